# Every third-party library, found once. The rule of who may link which is in docs/architecture.md
# and checked by tests/tidy.

find_package(Threads REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED)
find_package(spdlog CONFIG REQUIRED)
find_package(yaml-cpp CONFIG REQUIRED)
find_package(CLI11 CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)
find_package(RocksDB CONFIG REQUIRED)
find_package(OpenSSL REQUIRED)

# Libraries whose CMake packages ask for more than we use (oneDNN's wants OpenCL) or that have none.
function(muster_import name library header)
  find_library(MUSTER_${name}_LIBRARY ${library} REQUIRED)
  find_path(MUSTER_${name}_INCLUDE ${header} REQUIRED)
  add_library(muster_${name} UNKNOWN IMPORTED GLOBAL)
  set_target_properties(muster_${name} PROPERTIES
    IMPORTED_LOCATION ${MUSTER_${name}_LIBRARY}
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES ${MUSTER_${name}_INCLUDE})
  add_library(muster::${name} ALIAS muster_${name})
endfunction()
muster_import(httplib cpp-httplib httplib.h)
# What Debian's library is built with: the layout of its classes depends on it (cpp-httplib.pc).
set_target_properties(muster_httplib PROPERTIES INTERFACE_COMPILE_DEFINITIONS
  "CPPHTTPLIB_OPENSSL_SUPPORT;CPPHTTPLIB_ZLIB_SUPPORT;CPPHTTPLIB_BROTLI_SUPPORT")
muster_import(onednn dnnl oneapi/dnnl/dnnl.hpp)
# The runtime of Debian's oneDNN, whatever the compiler's own is (kernels/device/gnu_openmp.h).
find_library(MUSTER_GOMP_LIBRARY NAMES libgomp.so.1 REQUIRED)
muster_import(utf8proc utf8proc utf8proc.h)
muster_import(zlib z zlib.h)
muster_import(zstd zstd zstd.h)
find_library(MUSTER_JWT_LIBRARY jwt)
find_path(MUSTER_JWT_INCLUDE jwt.h)
if(NOT MUSTER_JWT_LIBRARY OR NOT MUSTER_JWT_INCLUDE)
  message(STATUS "Muster: no libjwt, so that OpenID Connect is left out")
endif()
# Keys of issuers of identity tokens are fetched by it.
find_library(MUSTER_CURL_LIBRARY curl)
find_path(MUSTER_CURL_INCLUDE curl/curl.h)
if(NOT MUSTER_CURL_LIBRARY OR NOT MUSTER_CURL_INCLUDE)
  message(STATUS "Muster: no libcurl, so that keys of issuers are read from files alone")
endif()

if(MUSTER_TESTS)
  find_package(GTest REQUIRED)
  find_package(benchmark REQUIRED)
endif()

set(MUSTER_HAVE_CUDA OFF)
if(NOT MUSTER_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER AND EXISTS /usr/local/cuda/bin/nvcc)
    set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_ARCHITECTURES ${MUSTER_CUDA_ARCHITECTURES})
    # For definitions, which a semicolon would cut in two.
    string(REPLACE ";" "," MUSTER_CUDA_ARCHITECTURES_TEXT "${MUSTER_CUDA_ARCHITECTURES}")
    enable_language(CUDA)
    set(CMAKE_CUDA_STANDARD 20)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc has it
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    # ccache knows paths behind a space from those of another clone, and not behind the "=" that CMake
    # would write.
    set(CMAKE_INCLUDE_SYSTEM_FLAG_CUDA "-isystem ")
    find_package(CUDAToolkit REQUIRED)
    set(MUSTER_HAVE_CUDA ON)
    # cuDNN's fused attention needs its library, its headers and those of its frontend (PyPI:
    # nvidia-cudnn-frontend). Without them our own attention kernels serve.
    find_library(MUSTER_CUDNN_LIBRARY NAMES cudnn libcudnn.so.9
      HINTS ${CUDAToolkit_LIBRARY_DIR})
    find_path(MUSTER_CUDNN_INCLUDE cudnn_graph.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
    find_path(MUSTER_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h
      HINTS ${CMAKE_SOURCE_DIR}/.cache/cudnn-frontend/include ${CMAKE_SOURCE_DIR}/.cache/python/include
            ${CUDAToolkit_INCLUDE_DIRS}
      DOC "Folder of cudnn_frontend.h")
    set(MUSTER_HAVE_CUDNN OFF)
    if(MUSTER_CUDNN_LIBRARY AND MUSTER_CUDNN_INCLUDE AND MUSTER_CUDNN_FRONTEND_INCLUDE)
      set(MUSTER_HAVE_CUDNN ON)
    endif()
    message(STATUS "Muster: attention through cuDNN ${MUSTER_HAVE_CUDNN}")
    # NCCL's library is loaded when a job with GPUs needs it; only its header is needed here.
    find_path(MUSTER_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
    set(MUSTER_HAVE_NCCL OFF)
    if(MUSTER_NCCL_INCLUDE)
      set(MUSTER_HAVE_NCCL ON)
    endif()
    message(STATUS "Muster: NCCL ${MUSTER_HAVE_NCCL}")
  elseif(MUSTER_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MUSTER_CUDA=ON, but no CUDA compiler was found")
  endif()
endif()
message(STATUS "Muster: CUDA engine ${MUSTER_HAVE_CUDA}")
