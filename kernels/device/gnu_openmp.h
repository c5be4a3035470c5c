// The two functions of GNU's OpenMP runtime that keep oneDNN to the threads of this program.
// Debian's oneDNN runs on libgomp, whose header only gcc finds; another runtime's functions would
// not reach it.
#ifndef MUSTER_KERNELS_DEVICE_GNU_OPENMP_H_
#define MUSTER_KERNELS_DEVICE_GNU_OPENMP_H_

// Of the calling thread.
extern "C" int omp_get_max_threads();
extern "C" void omp_set_num_threads(int threads);

#endif  // MUSTER_KERNELS_DEVICE_GNU_OPENMP_H_
