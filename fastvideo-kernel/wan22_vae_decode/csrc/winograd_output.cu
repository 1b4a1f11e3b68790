// SPDX-License-Identifier: Apache-2.0
// Output transform of F(4 x m, 3x3), m = 4 or 3, with bias and residual, for a range of tile rows:
//   y [T, H, W, C] = A^T m A' + bias (+ residual), m [6 (m + 2), T, tile rows, tiles, C] the components' products, of
// y's type or fp32, in fp32, rounded once; tiles that stick out are cropped. The residual may be y itself.
// A thread takes four channels of a tile, two rows of components in flight. Bound: memory, 2.25 activations read
// (m = 4) and one written, one more read for the residual: 84 to 89 % of the copy rate.
#include "launch.cuh"
#include "winograd.cuh"

struct WinogradOutputProblem {
  int32_t frames, rows, columns, channels;
  int32_t tile_columns, first_tile_row, tile_rows;
};

namespace wan {

struct WinogradOutputArguments {
  const void* m;
  const float* bias;
  const void* residual;
  void* y;
  uint32_t rows, columns, quads;                 // quads of channels
  uint32_t first_tile_row, tiles_across, items;  // items: tiles x quads of a frame
  int64_t component_stride;                      // in quads
};

namespace winograd {

// The products of four channels, as one load moves them: of type M.
template <typename M>
struct Products {
  static constexpr int kThreads = 256, kBlocks = 2;  // of a block, and those that a multiprocessor holds at least
  using Bits = uint2;
  static __device__ void unpack(Bits bits, float (&values)[4]) { to_floats<M>(bits, values); }
};
template <>
struct Products<float> {
  static constexpr int kThreads = 128, kBlocks = 3;  // as many loads in flight take more registers
  using Bits = float4;
  static __device__ void unpack(Bits bits, float (&values)[4]) {
    values[0] = bits.x, values[1] = bits.y, values[2] = bits.z, values[3] = bits.w;
  }
};
template <typename M>
using ProductBits = typename Products<M>::Bits;

// One row of a tile's components, transformed along the row.
template <typename M, int kTileColumns>
__device__ inline void transform_line(const ProductBits<M>* m, int64_t component_stride,
                                      float (&line)[4][kTileColumns]) {
  constexpr int kWidth = kTileColumns + 2;
  ProductBits<M> bits[kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) bits[j] = __ldg(m + j * component_stride);
  float products[4][kWidth];
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    float values[4];
    Products<M>::unpack(bits[j], values);
#pragma unroll
    for (int c = 0; c < 4; ++c) products[c][j] = values[c];
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) output_row(products[c], line[c]);
}

// Adds two rows of components to the tile y[column][channel][row].
template <typename M, int kPair, int kTileColumns>
__device__ inline void add_pair(const ProductBits<M>* m, int64_t component_stride,
                                float (&y)[kTileColumns][4][kTileRows]) {
  float first[4][kTileColumns], second[4][kTileColumns];
  const int64_t row_stride = (kTileColumns + 2) * component_stride;
  transform_line<M>(m + pair_row(kPair, 0) * row_stride, component_stride, first);
  transform_line<M>(m + pair_row(kPair, 1) * row_stride, component_stride, second);
#pragma unroll
  for (int q = 0; q < kTileColumns; ++q) {
#pragma unroll
    for (int c = 0; c < 4; ++c) output_pair<kPair>(first[c][q], second[c][q], y[q][c]);
  }
}

template <typename T, typename M, int kTileColumns, bool kResidual>
__global__ void __launch_bounds__(Products<M>::kThreads, Products<M>::kBlocks)
    winograd_output_kernel(const __grid_constant__ WinogradOutputArguments a) {
  const uint32_t item = blockIdx.x * blockDim.x + threadIdx.x;
  if (item >= a.items) return;
  const uint32_t tile = item / a.quads, quad = item - tile * a.quads;
  const uint32_t tile_row = tile / a.tiles_across;
  const uint32_t row = kTileRows * (a.first_tile_row + tile_row);
  const uint32_t column = kTileColumns * (tile - tile_row * a.tiles_across);
  const auto* m = static_cast<const ProductBits<M>*>(a.m) + blockIdx.y * int64_t(a.items) + item;
  float y[kTileColumns][4][kTileRows];
  add_pair<M, 1>(m, a.component_stride, y);
  add_pair<M, 2>(m, a.component_stride, y);
  add_pair<M, 0>(m, a.component_stride, y);

  const float4 bias = __ldg(reinterpret_cast<const float4*>(a.bias) + quad);
  const int64_t first = ((int64_t(blockIdx.y) * a.rows + row) * a.columns + column) * a.quads + quad;
  // Not __ldg: the residual may be what this thread overwrites.
  const uint2* residual = static_cast<const uint2*>(a.residual) + first;
  T* target = static_cast<T*>(a.y) + 4 * first;
#pragma unroll
  for (uint32_t p = 0; p < kTileRows; ++p) {
    if (row + p >= a.rows) return;
    uint2 added[kTileColumns];
    if constexpr (kResidual) {
#pragma unroll
      for (uint32_t q = 0; q < kTileColumns; ++q) {
        if (column + q < a.columns) added[q] = residual[(int64_t(p) * a.columns + q) * a.quads];
      }
    }
#pragma unroll
    for (uint32_t q = 0; q < kTileColumns; ++q) {
      if (column + q >= a.columns) continue;
      float values[4] = {y[q][0][p] + bias.x, y[q][1][p] + bias.y, y[q][2][p] + bias.z, y[q][3][p] + bias.w};
      if constexpr (kResidual) {
        float extra[4];
        to_floats<T>(added[q], extra);
#pragma unroll
        for (int c = 0; c < 4; ++c) values[c] += extra[c];
      }
      store_floats(target + 4 * (int64_t(p) * a.columns + q) * a.quads, values);
    }
  }
}

template <typename T, typename M, int kTileColumns>
int winograd_output(const WinogradOutputArguments& a, int frames, cudaStream_t stream) {
  constexpr int kThreads = Products<M>::kThreads;
  const dim3 grid(static_cast<unsigned>(ceil_div(a.items, kThreads)), frames);
  if (a.residual != nullptr) {
    winograd_output_kernel<T, M, kTileColumns, true><<<grid, kThreads, 0, stream>>>(a);
  } else {
    winograd_output_kernel<T, M, kTileColumns, false><<<grid, kThreads, 0, stream>>>(a);
  }
  return check_launch("winograd_output");
}

template <typename T, typename M>
int winograd_output(const WinogradOutputArguments& a, int tile_columns, int frames, cudaStream_t stream) {
  return tile_columns == 4 ? winograd_output<T, M, 4>(a, frames, stream) : winograd_output<T, M, 3>(a, frames, stream);
}

template <typename T>
int winograd_output(const WinogradOutputArguments& a, bool float_products, int tile_columns, int frames,
                    cudaStream_t stream) {
  return float_products ? winograd_output<T, float>(a, tile_columns, frames, stream)
                        : winograd_output<T, T>(a, tile_columns, frames, stream);
}

}  // namespace winograd
}  // namespace wan

WAN_EXPORT int wan_winograd_output(const WinogradOutputProblem* problem, const void* m, const float* bias,
                                   const void* residual, void* y, int m_dtype, int dtype, int device,
                                   cudaStream_t stream) {
  const WinogradOutputProblem& p = *problem;
  if (p.frames < 1 || p.rows < 1 || p.columns < 1 || p.tile_rows < 1) return wan::fail("winograd_output: empty output");
  if (p.channels < 8 || p.channels % 8) {
    return wan::fail("winograd_output: %d channels are not a multiple of 8", p.channels);
  }
  if (p.tile_columns != 3 && p.tile_columns != 4) {
    return wan::fail("winograd_output: tiles have 3 or 4 columns, not %d", p.tile_columns);
  }
  if (m_dtype != dtype && m_dtype != wan::kFp32) {
    return wan::fail("winograd_output: no kernel for products of dtype %d", m_dtype);
  }
  const int64_t tiles_down = wan::ceil_div(p.rows, wan::winograd::kTileRows);
  const int64_t tiles_across = wan::ceil_div(p.columns, p.tile_columns);
  if (p.first_tile_row < 0 || p.first_tile_row + int64_t(p.tile_rows) > tiles_down) {
    return wan::fail("winograd_output: tile rows %d + %d of %lld", p.first_tile_row, p.tile_rows,
                     (long long)tiles_down);
  }
  const int64_t items = p.tile_rows * tiles_across * (p.channels / 4);
  if (items > INT32_MAX || p.frames > 65535) return wan::fail("winograd_output: %d frames in one launch", p.frames);
  const void* pointers[] = {m, bias, residual, y};
  for (const void* pointer : pointers) {
    if (!wan::is_aligned16(pointer)) return wan::fail("winograd_output: every pointer must be aligned to 16 bytes");
  }
  wan::DeviceGuard guard(device);
  if (guard.check(device)) return 1;
  const wan::WinogradOutputArguments arguments{m,
                                               bias,
                                               residual,
                                               y,
                                               uint32_t(p.rows),
                                               uint32_t(p.columns),
                                               uint32_t(p.channels / 4),
                                               uint32_t(p.first_tile_row),
                                               uint32_t(tiles_across),
                                               uint32_t(items),
                                               p.frames * items};
  switch (dtype) {
    case wan::kFp16:
      return wan::winograd::winograd_output<__half>(arguments, m_dtype == wan::kFp32, p.tile_columns, p.frames, stream);
    case wan::kBf16:
      return wan::winograd::winograd_output<__nv_bfloat16>(arguments, m_dtype == wan::kFp32, p.tile_columns, p.frames,
                                                           stream);
    default:
      return wan::fail("winograd_output: no kernel for dtype %d", dtype);
  }
}
