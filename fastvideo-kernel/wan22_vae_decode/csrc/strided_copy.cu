// SPDX-License-Identifier: Apache-2.0
// Copies `count` pieces of `bytes` bytes each, piece i from source + i * source_stride to target + i * target_stride:
// halo rows and row bands out of activations, frames into them. Everything is a multiple of 16 bytes; pieces must not
// overlap. Four 16-byte loads in flight per thread. Bound: memory, for the few megabytes
// that it moves the launch.
#include "launch.cuh"

namespace wan {

constexpr int kThreads = 256, kUnroll = 4;

__global__ void __launch_bounds__(kThreads)
    strided_copy_kernel(const uint4* __restrict__ source, uint4* __restrict__ target, int64_t source_stride,
                        int64_t target_stride, int64_t vectors, int64_t count) {
  const int64_t first = int64_t(blockIdx.x) * (kThreads * kUnroll) + threadIdx.x;
  for (int64_t piece = blockIdx.y; piece < count; piece += gridDim.y) {
    const uint4* from = source + piece * source_stride;
    uint4* to = target + piece * target_stride;
    uint4 data[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kThreads < vectors) data[i] = from[first + i * kThreads];
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i * kThreads < vectors) to[first + i * kThreads] = data[i];
    }
  }
}

}  // namespace wan

WAN_EXPORT int wan_strided_copy(const void* source, void* target, int64_t source_stride, int64_t target_stride,
                                int64_t bytes, int64_t count, int device, cudaStream_t stream) {
  if (bytes < 1 || count < 1) return wan::fail("strided_copy: nothing to copy");
  if (bytes % 16 || source_stride % 16 || target_stride % 16 || !wan::is_aligned16(source) ||
      !wan::is_aligned16(target)) {
    return wan::fail("strided_copy: sizes, strides and pointers must be multiples of 16 bytes");
  }
  wan::DeviceGuard guard(device);
  if (guard.check(device)) return 1;
  const int64_t vectors = bytes / 16;
  const int64_t blocks = wan::ceil_div(vectors, wan::kThreads * wan::kUnroll);
  if (blocks > INT32_MAX) return wan::fail("strided_copy: pieces of %lld bytes are too large", (long long)bytes);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(count < 65535 ? count : 65535));
  wan::strided_copy_kernel<<<grid, wan::kThreads, 0, stream>>>(static_cast<const uint4*>(source),
                                                               static_cast<uint4*>(target), source_stride / 16,
                                                               target_stride / 16, vectors, count);
  return wan::check_launch("strided_copy");
}
