// How a public op reaches the implementation for its stream's device. For the .cc file of a folder
// that checks arguments, and for ops that call others of their own device.
#ifndef MUSTER_KERNELS_TWINS_H_
#define MUSTER_KERNELS_TWINS_H_

// Declares cpu::op and cuda::op with the parameters of kernels::op. Used inside namespace
// muster::kernels, behind the header of the op.
#define MUSTER_TWINS(op)    \
  namespace cpu {           \
  decltype(kernels::op) op; \
  }                         \
  namespace cuda {          \
  decltype(kernels::op) op; \
  }

// Calls the twin for the device of `stream`, which is a variable in reach.
#ifdef MUSTER_KERNELS_CUDA
#define MUSTER_DISPATCH(op, ...)                     \
  if (stream.device().kind() == DeviceKind::kCuda) { \
    cuda::op(stream, __VA_ARGS__);                   \
  } else {                                           \
    cpu::op(stream, __VA_ARGS__);                    \
  }
#else
#define MUSTER_DISPATCH(op, ...)                                                \
  CHECK(stream.device().kind() == DeviceKind::kCpu)                             \
      << #op " was called on a stream of " << stream.device().name()            \
      << ", but this build has no CUDA engine (configure with MUSTER_CUDA=ON)"; \
  cpu::op(stream, __VA_ARGS__)
#endif

#endif  // MUSTER_KERNELS_TWINS_H_
