// SPDX-License-Identifier: Apache-2.0
// Second half of nearest x2 + 3x3 conv as four phases: interleaves them and adds bias and DupUp3D shortcut,
//   y[j, 2h+r, 2w+c, o] = phases[r][c][j, h, w, o] + bias[o] + shortcut (upsample_shortcut.cuh)
// for phases [2, 2, F, H, W, C], s [T, H, W, C_s] and y [F, 2H, 2W, C], all dense. A thread takes eight channels of one
// source pixel, all its loads in flight before the first use. Bound: memory (phases and shortcut read once, y written
// once).
#include "launch.cuh"
#include "upsample_shortcut.cuh"

struct UpsampleCombineProblem {
  int32_t frames, rows, columns, channels;  // F, H, W, C
  int32_t shortcut_channels, time_factor;   // C_s, f
  int32_t first_frame;                      // of the enlarged shortcut, at the first frame here
};

namespace wan {

struct UpsampleCombineArguments {
  const void *phases, *shortcut;
  const float* bias;
  void* y;
  uint32_t rows, columns, vectors;
  uint32_t shortcut_channels, time_factor, first_frame, repeats;
};

template <typename T, Shortcut kShortcut>
__global__ void __launch_bounds__(256) upsample_combine_kernel(const __grid_constant__ UpsampleCombineArguments a) {
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t pixel = index / a.vectors;
  if (pixel >= a.rows * a.columns) return;
  const uint32_t vector = index - pixel * a.vectors;
  const uint32_t row = pixel / a.columns;
  const uint32_t column = pixel - row * a.columns;
  const uint32_t j = blockIdx.y;
  const int64_t frame_pixels = int64_t(a.rows) * a.columns;

  const int64_t stride = gridDim.y * frame_pixels * a.vectors;  // between phases
  const uint4* phase = static_cast<const uint4*>(a.phases) + (j * frame_pixels + pixel) * a.vectors + vector;
  uint4 phases[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) phases[i] = phase[i * stride];

  const uint32_t time = a.first_frame + j;
  const uint32_t source_frame = time / a.time_factor;
  const uint32_t time_phase = time - source_frame * a.time_factor;
  const T* source = static_cast<const T*>(a.shortcut) + (source_frame * frame_pixels + pixel) * a.shortcut_channels;
  ShortcutVectors<T, kShortcut> shortcut;
  shortcut.load(source, vector);
  float bias[8];
  load_floats(a.bias + 8 * vector, bias);

  const int64_t line = 2 * (int64_t(j) * a.rows + row);
  uint4* y = static_cast<uint4*>(a.y) + (line * 2 * a.columns + 2 * column) * a.vectors + vector;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float values[8], extra[8];
      to_floats<T>(phases[2 * r + c], values);
      shortcut.values(source, vector, a.time_factor, a.repeats, time_phase, r, c, extra);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] += bias[i] + extra[i];
      y[(r * 2 * int64_t(a.columns) + c) * a.vectors] = from_floats<T>(values);
    }
  }
}

template <typename T>
int upsample_combine(const UpsampleCombineArguments& a, uint32_t frames, cudaStream_t stream) {
  const int64_t threads = int64_t(a.rows) * a.columns * a.vectors;
  const dim3 grid(static_cast<unsigned>(ceil_div(threads, 256)), frames);
  switch (shortcut_kind(a.vectors * 8, a.shortcut_channels, a.time_factor)) {
    case Shortcut::kSame:
      upsample_combine_kernel<T, Shortcut::kSame><<<grid, 256, 0, stream>>>(a);
      break;
    case Shortcut::kRowPair:
      upsample_combine_kernel<T, Shortcut::kRowPair><<<grid, 256, 0, stream>>>(a);
      break;
    case Shortcut::kAny:
      upsample_combine_kernel<T, Shortcut::kAny><<<grid, 256, 0, stream>>>(a);
      break;
  }
  return check_launch("upsample_combine");
}

}  // namespace wan

WAN_EXPORT int wan_upsample_combine(const UpsampleCombineProblem* problem, const void* phases, const float* bias,
                                    const void* shortcut, void* y, int dtype, int device, cudaStream_t stream) {
  const UpsampleCombineProblem& p = *problem;
  if (p.frames < 1 || p.rows < 1 || p.columns < 1) return wan::fail("upsample_combine: empty input");
  if (wan::check_shortcut("upsample_combine", p.channels, p.shortcut_channels, p.time_factor)) return 1;
  if (p.frames > 65535 || int64_t(p.rows) * p.columns * (p.channels / 8) > INT32_MAX) {
    return wan::fail("upsample_combine: a frame of %d x %d is too large", p.rows, p.columns);
  }
  if (!wan::is_aligned16(phases) || !wan::is_aligned16(bias) || !wan::is_aligned16(shortcut) || !wan::is_aligned16(y)) {
    return wan::fail("upsample_combine: every pointer must be aligned to 16 bytes");
  }
  wan::DeviceGuard guard(device);
  if (guard.check(device)) return 1;
  const wan::UpsampleCombineArguments arguments{phases,
                                                shortcut,
                                                bias,
                                                y,
                                                uint32_t(p.rows),
                                                uint32_t(p.columns),
                                                uint32_t(p.channels / 8),
                                                uint32_t(p.shortcut_channels),
                                                uint32_t(p.time_factor),
                                                uint32_t(p.first_frame),
                                                uint32_t(p.channels * 4 * p.time_factor / p.shortcut_channels)};
  switch (dtype) {
    case wan::kFp16:
      return wan::upsample_combine<__half>(arguments, p.frames, stream);
    case wan::kBf16:
      return wan::upsample_combine<__nv_bfloat16>(arguments, p.frames, stream);
    default:
      return wan::fail("upsample_combine: no kernel for dtype %d", dtype);
  }
}
