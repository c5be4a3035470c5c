# muster_library, muster_binary and muster_test: every target of the tree is made by one of these,
# so that warnings, sanitizers and include roots are decided in one place.

add_library(muster_options INTERFACE)
target_include_directories(muster_options INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(muster_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers>)
# gcc 12 sees overlapping copies in std::string's own assignment (gcc bug 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(muster_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(MUSTER_WERROR)
  target_compile_options(muster_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(muster_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wthread-safety>)
endif()
if(MUSTER_SANITIZE)
  target_compile_options(muster_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${MUSTER_SANITIZE} -fno-omit-frame-pointer -g1>)
  target_link_options(muster_options INTERFACE -fsanitize=${MUSTER_SANITIZE})
endif()

# Third-party and generated headers are included as SYSTEM so that only our code must be warning-free.
function(muster_library name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SRCS})
  target_link_libraries(${name} PUBLIC ${ARG_DEPS} PRIVATE muster_options ${ARG_PRIVATE_DEPS})
  target_include_directories(${name} PUBLIC ${CMAKE_SOURCE_DIR})
endfunction()

function(muster_binary name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE muster_options ${ARG_DEPS})
endfunction()

# One binary per folder of tests; ctest knows it by its name. LABELS: unit (default), contract, sim,
# fuzz, parity, e2e, gpu, ... Those of the first four labels build as the target
# muster_checked_tests, which ./dev check runs under ASan and UBSan. THREADS says that several of
# our threads meet in it: it then builds as muster_threaded_tests too, and has the label "threads".
# It must reach no lock that ThreadSanitizer cannot see (base/mutex.h), so no gRPC.
function(muster_test name)
  cmake_parse_arguments(ARG "THREADS" "TIMEOUT" "SRCS;DEPS;LABELS;ARGS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE muster_options muster_test_main ${ARG_DEPS})
  add_test(NAME ${name} COMMAND ${name} ${ARG_ARGS})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  # Sanitizers make a program some ten times slower, and machines differ.
  if(MUSTER_SANITIZE)
    math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 5")
  endif()
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(ARG_LABELS MATCHES "^(unit|contract|sim|fuzz)$")
    add_dependencies(muster_checked_tests ${name})
  endif()
  if(ARG_THREADS)
    add_dependencies(muster_threaded_tests ${name})
    list(APPEND ARG_LABELS threads)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT})
endfunction()
