// Whether a sanitizer watches, under which code runs some 20 times as long, and how much a test of
// random cases does then.
#ifndef MUSTER_TESTS_SUPPORT_SANITIZED_H_
#define MUSTER_TESTS_SUPPORT_SANITIZED_H_

namespace muster::testing {

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define MUSTER_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(MUSTER_SANITIZED)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// Of `all` random cases, or of a bound on how many of them are of some kind, the part to take: a
// sanitizer looks for code that breaks rules of the language, which a tenth of the cases reach too.
constexpr int Cases(int all) { return kSanitized ? all / 10 : all; }

}  // namespace muster::testing

#endif  // MUSTER_TESTS_SUPPORT_SANITIZED_H_
