// SPDX-License-Identifier: Apache-2.0
// Second half of conv_out: sums the nine shifted copies that the temporal conv left as channels, adds the bias, tests
// for NaN and infinity, clamps to [-1, 1], un-patchifies and writes pixels:
//   v[o] = bias[o] + sum_{i,j} part[t, y+i-1, x+j-1, 12*(3i+j) + o]   (outside the image: 0)
//   video[ch, t, 2y+q, 2x+r] = clamp(v[4ch + 2r + q]),  uint8: (v/2 + 0.5) * 255 truncated, NaN 0
// part is [T, R, W, 112] dense, R = H or H + 2 with halo rows; video has free strides and adjacent columns. A block
// stages a 32 x 8 tile with its rim in shared memory, a thread makes one pixel's 2 x 2 x 3 values. Bound: memory (part
// read once, video written once): 79 % of the copy rate.
#include <cuda_pipeline_primitives.h>

#include "launch.cuh"
#include "vec8.cuh"

struct HeadProblem {
  int64_t stride_channel, stride_frame, stride_row;  // of the video, in elements
  int32_t frames, rows, columns, halo;               // rows without halo
};

namespace wan {

constexpr int kTileRows = 8, kTileColumns = 32;
constexpr int kPartVectors = 14;    // 112 channels
constexpr int kStagedVectors = 15;  // a padded pixel keeps bank conflicts two-way
constexpr int kRimRows = kTileRows + 2, kRimColumns = kTileColumns + 2;
constexpr int kStagedBytes = kRimRows * kRimColumns * kStagedVectors * 16;

struct HeadArguments {
  const uint4* part;
  const float* bias;
  void* video;
  int32_t* nonfinite;
  int64_t stride_channel, stride_frame, stride_row;
  int32_t rows, columns, halo;
  bool paired;  // two neighbouring pixels may be stored at once
};

template <typename Out>
__device__ inline Out to_pixel(float value) {
  // fmin and fmax would turn NaN into a number.
  return from_float<Out>(value != value ? value : fminf(fmaxf(value, -1.0f), 1.0f));
}
template <>
__device__ inline uint8_t to_pixel<uint8_t>(float value) {
  if (value != value) return 0;
  const float clamped = fminf(fmaxf(value, -1.0f), 1.0f);
  return static_cast<uint8_t>(__fmul_rn(__fadd_rn(__fmul_rn(clamped, 0.5f), 0.5f), 255.0f));
}

// Two neighbouring pixels as one store.
__device__ inline void store_pair(float* target, float left, float right) {
  __stcs(reinterpret_cast<float2*>(target), make_float2(left, right));
}
__device__ inline void store_pair(__half* target, __half left, __half right) {
  __stcs(reinterpret_cast<__half2*>(target), __halves2half2(left, right));
}
__device__ inline void store_pair(__nv_bfloat16* target, __nv_bfloat16 left, __nv_bfloat16 right) {
  __stcs(reinterpret_cast<__nv_bfloat162*>(target), __halves2bfloat162(left, right));
}
__device__ inline void store_pair(uint8_t* target, uint8_t left, uint8_t right) {
  __stcs(reinterpret_cast<uchar2*>(target), make_uchar2(left, right));
}

template <typename T, typename Out>
__global__ void __launch_bounds__(kTileRows* kTileColumns) output_head_kernel(const __grid_constant__ HeadArguments a) {
  extern __shared__ uint4 staged[];
  const int first_row = blockIdx.y * kTileRows, first_column = blockIdx.x * kTileColumns;
  const int64_t frame = blockIdx.z;
  const int part_rows = a.rows + 2 * a.halo;
  const uint4* part = a.part + frame * part_rows * a.columns * kPartVectors;
  for (int i = threadIdx.x; i < kRimRows * kRimColumns * kPartVectors; i += kTileRows * kTileColumns) {
    const int pixel = i / kPartVectors, vector = i % kPartVectors;
    const int row = first_row + pixel / kRimColumns - 1 + a.halo;  // of part
    const int column = first_column + pixel % kRimColumns - 1;
    const bool inside = row >= 0 && row < part_rows && column >= 0 && column < a.columns;
    const int64_t offset = inside ? (int64_t(row) * a.columns + column) * kPartVectors + vector : 0;
    __pipeline_memcpy_async(staged + pixel * kStagedVectors + vector, part + offset, 16, inside ? 0 : 16);
  }
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();

  const int y = threadIdx.x / kTileColumns, x = threadIdx.x % kTileColumns;
  if (first_row + y >= a.rows || first_column + x >= a.columns) return;
  float values[12];
#pragma unroll
  for (int o = 0; o < 12; ++o) values[o] = __ldg(a.bias + o);
#pragma unroll
  for (int tap = 0; tap < 9; ++tap) {
    const int pixel = (y + tap / 3) * kRimColumns + x + tap % 3;
    const char* taps = reinterpret_cast<const char*>(staged + pixel * kStagedVectors) + 24 * tap;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      using T2 = typename Pair<T>::type;
      const uint2 bits = *reinterpret_cast<const uint2*>(taps + 8 * i);
      const float2 low = unpack(*reinterpret_cast<const T2*>(&bits.x));
      const float2 high = unpack(*reinterpret_cast<const T2*>(&bits.y));
      values[4 * i] += low.x, values[4 * i + 1] += low.y;
      values[4 * i + 2] += high.x, values[4 * i + 3] += high.y;
    }
  }
  bool finite = true;
#pragma unroll
  for (int o = 0; o < 12; ++o) finite = finite && isfinite(values[o]);
  if (!finite) *a.nonfinite = 1;

  Out* video = static_cast<Out*>(a.video) + frame * a.stride_frame + int64_t(2) * (first_row + y) * a.stride_row +
               int64_t(2) * (first_column + x);
#pragma unroll
  for (int channel = 0; channel < 3; ++channel) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const Out left = to_pixel<Out>(values[4 * channel + q]), right = to_pixel<Out>(values[4 * channel + 2 + q]);
      Out* target = video + channel * a.stride_channel + q * a.stride_row;
      if (a.paired) {
        store_pair(target, left, right);
      } else {
        target[0] = left;
        target[1] = right;
      }
    }
  }
}

template <typename T, typename Out>
int output_head(HeadArguments a, int frames, cudaStream_t stream) {
  a.paired = reinterpret_cast<uintptr_t>(a.video) % (2 * sizeof(Out)) == 0 && a.stride_channel % 2 == 0 &&
             a.stride_frame % 2 == 0 && a.stride_row % 2 == 0;
  auto kernel = output_head_kernel<T, Out>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStagedBytes);
  if (status != cudaSuccess) return fail("output_head: %s", cudaGetErrorString(status));
  const dim3 grid(static_cast<unsigned>(ceil_div(a.columns, kTileColumns)),
                  static_cast<unsigned>(ceil_div(a.rows, kTileRows)), frames);
  kernel<<<grid, kTileRows * kTileColumns, kStagedBytes, stream>>>(a);
  return check_launch("output_head");
}

template <typename T>
int output_head(const HeadArguments& a, int frames, int out_dtype, cudaStream_t stream) {
  switch (out_dtype) {
    case kFp16:
      return output_head<T, __half>(a, frames, stream);
    case kBf16:
      return output_head<T, __nv_bfloat16>(a, frames, stream);
    case kFp32:
      return output_head<T, float>(a, frames, stream);
    case kUint8:
      return output_head<T, uint8_t>(a, frames, stream);
    default:
      return fail("output_head: no pixels of dtype %d", out_dtype);
  }
}

}  // namespace wan

WAN_EXPORT int wan_output_head(const HeadProblem* problem, const void* part, const float* bias, void* video,
                               int32_t* nonfinite, int dtype, int out_dtype, int device, cudaStream_t stream) {
  const HeadProblem& p = *problem;
  if (p.frames < 1 || p.rows < 1 || p.columns < 1) return wan::fail("output_head: empty input");
  if (p.frames > 65535 || p.rows > 65535 * wan::kTileRows) return wan::fail("output_head: grid too large");
  if (!wan::is_aligned16(part)) return wan::fail("output_head: the input must be aligned to 16 bytes");
  wan::DeviceGuard guard(device);
  if (guard.check(device)) return 1;
  const wan::HeadArguments arguments{static_cast<const uint4*>(part),
                                     bias,
                                     video,
                                     nonfinite,
                                     p.stride_channel,
                                     p.stride_frame,
                                     p.stride_row,
                                     p.rows,
                                     p.columns,
                                     p.halo != 0,
                                     false};
  switch (dtype) {
    case wan::kFp16:
      return wan::output_head<__half>(arguments, p.frames, out_dtype, stream);
    case wan::kBf16:
      return wan::output_head<__nv_bfloat16>(arguments, p.frames, out_dtype, stream);
    default:
      return wan::fail("output_head: no kernel for dtype %d", dtype);
  }
}
