// SPDX-License-Identifier: Apache-2.0
// DupUp3D, the shortcut that an upsampling conv's output adds: output channel o of phase (t, r, c), in time, rows and
// columns, takes channel (4f o + 4t + 2r + c) / q of its source pixel, q = 4f C_out / C_s.
#pragma once
#include "launch.cuh"
#include "vec8.cuh"

namespace wan {

enum class Shortcut {
  kSame,     // C_s = C_out: channel o for every phase
  kRowPair,  // C_s = 2 C_out, f = 1: channel 2o + r
  kAny,
};

inline Shortcut shortcut_kind(int32_t channels, int32_t shortcut_channels, int32_t time_factor) {
  if (shortcut_channels == channels) return Shortcut::kSame;
  return shortcut_channels == 2 * channels && time_factor == 1 ? Shortcut::kRowPair : Shortcut::kAny;
}

// Refuses channels that the kernels cannot take.
inline int check_shortcut(const char* kernel, int32_t channels, int32_t shortcut_channels, int32_t time_factor) {
  if (channels < 8 || channels % 8 || shortcut_channels < 8 || shortcut_channels % 8) {
    return fail("%s: channels %d, %d are not multiples of 8", kernel, channels, shortcut_channels);
  }
  const int32_t enlarged = channels * 4 * time_factor;
  return enlarged % shortcut_channels == 0
             ? 0
             : fail("%s: %d shortcut channels do not divide %d", kernel, shortcut_channels, enlarged);
}

// The shortcut's vectors for eight output channels of one source pixel, loaded ahead of their use.
template <typename T, Shortcut kShortcut>
struct ShortcutVectors {
  static constexpr int kCount = kShortcut == Shortcut::kSame ? 1 : kShortcut == Shortcut::kRowPair ? 2 : 0;
  uint4 data[kCount + 1];  // no array is empty

  __device__ void load(const T* pixel, uint32_t vector) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) data[n] = __ldg(reinterpret_cast<const uint4*>(pixel) + kCount * vector + n);
  }

  // Of row phase `row`. Any other shortcut is read here, channel by channel.
  __device__ void values(const T* pixel, uint32_t vector, uint32_t time_factor, uint32_t repeats, uint32_t time_phase,
                         uint32_t row, uint32_t column, float (&result)[8]) const {
    if constexpr (kShortcut == Shortcut::kSame) {
      to_floats<T>(data[0], result);
    } else if constexpr (kShortcut == Shortcut::kRowPair) {
      float low[8], high[8];
      to_floats<T>(data[0], low);
      to_floats<T>(data[1], high);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        result[i] = row ? low[2 * i + 1] : low[2 * i];
        result[i + 4] = row ? high[2 * i + 1] : high[2 * i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t position = (8 * vector + i) * 4 * time_factor + 4 * time_phase + 2 * row + column;
        result[i] = to_float(pixel[position / repeats]);
      }
    }
  }
};

}  // namespace wan
