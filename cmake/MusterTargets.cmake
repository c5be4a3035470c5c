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
if(MUSTER_PRECOMPILED_HEADERS)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    # The compiler cache asks for headers that are told apart by what they say.
    target_compile_options(muster_options INTERFACE
      "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-Xclang -fno-pch-timestamp>")
  else()
    # gcc 12 warns of code in precompiled headers that it is silent about elsewhere.
    target_compile_options(muster_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-w>)
  endif()
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
  set_property(GLOBAL APPEND PROPERTY MUSTER_LIBRARIES ${name})
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
  set_property(GLOBAL APPEND PROPERTY MUSTER_TEST_BINARIES ${name})
  add_test(NAME ${name} COMMAND ${name} ${ARG_ARGS})
  # What a test itself computes is little, except in the simulator, and compiling is half of a first
  # build's time.
  if(NOT ARG_LABELS MATCHES "^(sim|parity|bench|gpu)$")
    target_compile_options(${name} PRIVATE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)
  endif()
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
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
    COST ${ARG_TIMEOUT})  # those that take longest start first
endfunction()

# Shares precompiled headers between our libraries, and others between our tests: reading headers is
# most of what compiling without optimisation takes. Off by default: with them a source compiles
# that lacks an include, and the compiler cache serves no other clone. To be called behind the
# targets.
function(muster_precompile_headers)
  set(plain <algorithm> <cstdint> <functional> <map> <memory> <optional> <set> <string> <utility>
      <vector> <absl/status/status.h> <absl/status/statusor.h> <absl/strings/str_cat.h>
      <absl/strings/str_format.h> <absl/strings/str_join.h> <absl/strings/str_split.h>
      <absl/synchronization/mutex.h> <absl/time/clock.h>)
  set(messages <muster/v1/job.pb.h> <muster/v1/rank.pb.h> <muster/v1/session.pb.h>)
  set(services <muster/v1/job_service.grpc.pb.h> <muster/v1/worker_service.grpc.pb.h>
      <muster/v1/rank_service.grpc.pb.h>)
  file(WRITE ${CMAKE_BINARY_DIR}/precompiled/empty.cc "")
  function(precompile name position library)
    add_library(muster_precompiled_${name} STATIC ${CMAKE_BINARY_DIR}/precompiled/empty.cc)
    # A compiler takes headers back with the very flags that they were precompiled with.
    set_target_properties(muster_precompiled_${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(muster_precompiled_${name} PRIVATE ${position})
    target_link_libraries(muster_precompiled_${name} PRIVATE muster_options muster_base ${library})
    target_precompile_headers(muster_precompiled_${name} PRIVATE ${ARGN})
  endfunction()
  precompile(plain -fPIC "" ${plain})
  precompile(messages -fPIC muster_proto ${plain} ${messages})
  precompile(services -fPIC muster_proto_services ${plain} ${messages} ${services})
  get_property(libraries GLOBAL PROPERTY MUSTER_LIBRARIES)
  foreach(library ${libraries})
    muster_seen_protos(${library} kind)
    # Kernels have flags of their own, below.
    if(kind AND NOT library STREQUAL "muster_kernels")
      target_precompile_headers(${library} REUSE_FROM muster_precompiled_${kind})
    endif()
  endforeach()
  if(MUSTER_TESTS)
    set(testing <gmock/gmock.h> <gtest/gtest.h>)
    precompile(plain_tests -fPIE muster_test_main ${plain} ${testing})
    precompile(messages_tests -fPIE "muster_test_main;muster_proto" ${plain} ${messages} ${testing})
    precompile(services_tests -fPIE "muster_test_main;muster_proto_services"
               ${plain} ${messages} ${services} ${testing})
    get_property(tests GLOBAL PROPERTY MUSTER_TEST_BINARIES)
    foreach(test ${tests})
      muster_seen_protos(${test} kind)
      if(kind)
        target_precompile_headers(${test} REUSE_FROM muster_precompiled_${kind}_tests)
      endif()
    endforeach()
  endif()
  # The arithmetic of a CPU rank is worth the compiler's time.
  if(NOT MUSTER_SANITIZE)
    target_compile_options(muster_kernels PRIVATE -O3)
  endif()
endfunction()

# Which generated headers a target's sources may include: "services" (gRPC), "messages" or none,
# "plain". Empty for gRPC without them: it brings -pthread, and clang wants to have seen that in the
# precompiled headers too.
function(muster_seen_protos target kind)
  get_target_property(next ${target} LINK_LIBRARIES)
  set(seen "")
  while(next)
    list(POP_FRONT next library)
    if(NOT library IN_LIST seen)
      list(APPEND seen ${library})
      if(library MATCHES "^muster_" AND TARGET ${library})
        get_target_property(more ${library} INTERFACE_LINK_LIBRARIES)
        if(more)
          list(APPEND next ${more})
        endif()
      endif()
    endif()
  endwhile()
  set(found plain)
  if("muster_proto_services" IN_LIST seen)
    set(found services)
  elseif("gRPC::grpc++" IN_LIST seen)
    set(found "")
  elseif("muster_proto" IN_LIST seen)
    set(found messages)
  endif()
  set(${kind} "${found}" PARENT_SCOPE)
endfunction()
