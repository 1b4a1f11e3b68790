// SPDX-License-Identifier: Apache-2.0
// Builds a causal conv's input in one pass: y [h + T, R, W, C] = h history frames (zeros if null), then every pixel of
// the rows (above, x, below) after RMS norm over C and SiLU:
//   n = x / max(|x|_2, 1e-12) * gamma,  y = n * sigmoid(n),  all in fp32, rounded once; null gamma copies.
// x is [T, H, W, C] with a free frame stride; R = H, or H + 2 with halo rows; `next` gets the last two frames again.
// One warp per group of pixels, 64 bytes in flight per lane. Bound: memory, one read and one write of the activation:
// 79 to 89 % of the copy rate.
#include "launch.cuh"
#include "norm_silu.cuh"

struct PadProblem {
  int64_t x_stride_frame;  // in elements
  int32_t history_frames, frames, rows, columns, channels, halo, silu;
};

namespace wan {

struct PadArguments {
  const void *x, *above, *below, *history;
  const float* gamma;
  void *y, *next;
  int64_t x_stride_frame;
  uint32_t history_frames, frames, rows, columns, vectors, pixels;  // rows with halo; vectors of 8 channels a pixel
  bool halo;
};

// Where a padded pixel comes from, and where it goes.
struct Pixel {
  const uint4* source;  // null: zeros
  uint4* next;          // null: not among the last two frames
  bool raw;             // history is normalised already
};

__device__ inline Pixel locate(const PadArguments& a, uint32_t frame, uint32_t row, uint32_t column) {
  const int64_t row_pixels = a.columns;
  const int64_t offset = (row * row_pixels + column) * a.vectors;
  const int64_t frame_vectors = int64_t(a.rows) * row_pixels * a.vectors;
  if (frame < a.history_frames) {
    const uint4* history = static_cast<const uint4*>(a.history);
    return {history == nullptr ? nullptr : history + frame * frame_vectors + offset, nullptr, true};
  }
  const int64_t t = frame - a.history_frames;
  const int64_t from_end = int64_t(a.frames) - t;  // 1 for the last frame
  uint4* next = static_cast<uint4*>(a.next);
  next = next != nullptr && from_end <= 2 ? next + (2 - from_end) * frame_vectors + offset : nullptr;
  const bool raw = a.gamma == nullptr;
  if (a.halo && (row == 0 || row + 1 == a.rows)) {
    const uint4* edge = static_cast<const uint4*>(row == 0 ? a.above : a.below);
    return {edge + (t * row_pixels + column) * a.vectors, next, raw};
  }
  const int64_t source_row = int64_t(row) - (a.halo ? 1 : 0);
  const uint4* x = static_cast<const uint4*>(a.x) + t * (a.x_stride_frame / 8);
  return {x + (source_row * row_pixels + column) * a.vectors, next, raw};
}

// kVectors 16-byte vectors a lane hold a pixel in registers; a warp takes kPixels consecutive pixels.
template <typename T, int kVectors, int kPixels, bool kSilu>
__global__ void __launch_bounds__(256, 3) norm_silu_pad_kernel(const __grid_constant__ PadArguments a) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * kPixels;
  if (first >= a.pixels) return;
  uint32_t frame = first / (a.rows * a.columns);
  uint32_t row = first / a.columns - frame * a.rows;
  uint32_t column = first % a.columns;
  Pixel pixels[kPixels];
  uint4 data[kPixels][kVectors];
#pragma unroll
  for (int p = 0; p < kPixels; ++p) {
    const bool inside = first + p < a.pixels;
    pixels[p] = inside ? locate(a, frame, row, column) : Pixel{nullptr, nullptr, true};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = lane + 32 * v;
      const bool load = pixels[p].source != nullptr && vector < a.vectors;
      data[p][v] = load ? __ldg(pixels[p].source + vector) : make_uint4(0, 0, 0, 0);
    }
    if (++column == a.columns) {
      column = 0;
      if (++row == a.rows) row = 0, ++frame;
    }
  }
  float scale[kPixels];
#pragma unroll
  for (int p = 0; p < kPixels; ++p) {
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sum += sum_of_squares<T>(data[p][v]);
    scale[p] = inverse_norm(warp_sum(sum));
  }
  uint4* y = static_cast<uint4*>(a.y);
#pragma unroll
  for (int p = 0; p < kPixels; ++p) {
    if (first + p >= a.pixels) return;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t vector = lane + 32 * v;
      if (vector >= a.vectors) continue;
      uint4 result = data[p][v];
      if (!pixels[p].raw) {
        float weights[8];
        load_weights<kSilu>(a.gamma + 8 * vector, weights);
        result = normalise<T, kSilu>(result, scale[p], weights);
      }
      y[int64_t(first + p) * a.vectors + vector] = result;
      if (pixels[p].next != nullptr) pixels[p].next[vector] = result;
    }
  }
}

// Any number of channels: reads each pixel twice, the second time from L1.
template <typename T, bool kSilu>
__global__ void __launch_bounds__(256) norm_silu_pad_wide_kernel(const __grid_constant__ PadArguments a) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t index = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (index >= a.pixels) return;
  const uint32_t frame = index / (a.rows * a.columns);
  const Pixel pixel = locate(a, frame, index / a.columns - frame * a.rows, index % a.columns);
  float sum = 0.0f;
  if (!pixel.raw) {
    for (uint32_t v = lane; v < a.vectors; v += 32) sum += sum_of_squares<T>(__ldg(pixel.source + v));
  }
  const float scale = inverse_norm(warp_sum(sum));
  uint4* y = static_cast<uint4*>(a.y) + int64_t(index) * a.vectors;
  for (uint32_t v = lane; v < a.vectors; v += 32) {
    uint4 result = pixel.source != nullptr ? __ldg(pixel.source + v) : make_uint4(0, 0, 0, 0);
    if (!pixel.raw) {
      float weights[8];
      load_weights<kSilu>(a.gamma + 8 * v, weights);
      result = normalise<T, kSilu>(result, scale, weights);
    }
    y[v] = result;
    if (pixel.next != nullptr) pixel.next[v] = result;
  }
}

template <typename T, bool kSilu>
int norm_silu_pad(const PadArguments& a, cudaStream_t stream) {
  constexpr int kWarps = 8;
  auto run = [&](auto kernel, int pixels_a_warp) {
    const int64_t blocks = ceil_div(a.pixels, kWarps * pixels_a_warp);
    kernel<<<static_cast<unsigned>(blocks), 32 * kWarps, 0, stream>>>(a);
    return check_launch("norm_silu_pad");
  };
  if (a.vectors <= 32) return run(norm_silu_pad_kernel<T, 1, 4, kSilu>, 4);
  if (a.vectors <= 64) return run(norm_silu_pad_kernel<T, 2, 2, kSilu>, 2);
  if (a.vectors <= 128) return run(norm_silu_pad_kernel<T, 4, 1, kSilu>, 1);
  return run(norm_silu_pad_wide_kernel<T, kSilu>, 1);
}

}  // namespace wan

WAN_EXPORT int wan_norm_silu_pad(const PadProblem* problem, const void* x, const void* above, const void* below,
                                 const void* history, const float* gamma, void* y, void* next, int dtype, int device,
                                 cudaStream_t stream) {
  const PadProblem& p = *problem;
  if (p.channels % 8 || p.x_stride_frame % 8) {
    return wan::fail("norm_silu_pad: %d channels or frame stride not a multiple of 8", p.channels);
  }
  if (p.frames < 1 || p.rows < 1 || p.columns < 1 || p.channels < 1) return wan::fail("norm_silu_pad: empty input");
  if (p.halo && (above == nullptr || below == nullptr)) return wan::fail("norm_silu_pad: halo rows are missing");
  const void* pointers[] = {x, above, below, history, gamma, y, next};
  for (const void* pointer : pointers) {
    if (!wan::is_aligned16(pointer)) return wan::fail("norm_silu_pad: every pointer must be aligned to 16 bytes");
  }
  const int32_t rows = p.rows + (p.halo ? 2 : 0);
  const int64_t pixels = int64_t(p.history_frames + p.frames) * rows * p.columns;
  // Pixel numbers are 32-bit, with room for the last warp's overhang; element offsets are 64-bit.
  if (pixels > INT32_MAX) return wan::fail("norm_silu_pad: %lld pixels in one launch", (long long)pixels);
  wan::DeviceGuard guard(device);
  if (guard.check(device)) return 1;
  const wan::PadArguments arguments{x,
                                    above,
                                    below,
                                    history,
                                    gamma,
                                    y,
                                    next,
                                    p.x_stride_frame,
                                    uint32_t(p.history_frames),
                                    uint32_t(p.frames),
                                    uint32_t(rows),
                                    uint32_t(p.columns),
                                    uint32_t(p.channels / 8),
                                    uint32_t(pixels),
                                    p.halo != 0};
  switch (dtype) {
    case wan::kFp16:
      return p.silu ? wan::norm_silu_pad<__half, true>(arguments, stream)
                    : wan::norm_silu_pad<__half, false>(arguments, stream);
    case wan::kBf16:
      return p.silu ? wan::norm_silu_pad<__nv_bfloat16, true>(arguments, stream)
                    : wan::norm_silu_pad<__nv_bfloat16, false>(arguments, stream);
    default:
      return wan::fail("norm_silu_pad: no kernel for dtype %d", dtype);
  }
}
