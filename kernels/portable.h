// Marks functions that are compiled for host and device.
#ifndef MUSTER_KERNELS_PORTABLE_H_
#define MUSTER_KERNELS_PORTABLE_H_

#ifdef __CUDACC__
#define MUSTER_HOST_DEVICE __host__ __device__
#else
#define MUSTER_HOST_DEVICE
#endif

#endif  // MUSTER_KERNELS_PORTABLE_H_
