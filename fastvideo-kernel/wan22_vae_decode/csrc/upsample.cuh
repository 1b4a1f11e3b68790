// SPDX-License-Identifier: Apache-2.0
// One-dimensional transforms of F(3, 2), for points 0, 1, -1 and infinity: additions. The matrices come from
// winograd.py.
#pragma once
#include "vec8.cuh"
#include "winograd_matrices.cuh"  // written by the build

namespace wan::upsample {

constexpr int kTile = 3, kWindow = kTile + 1;  // source pixels that a tile makes the outputs of, and that it reads

// A row of B^T times d is (d[last_of] + sign_of * d[first_of]) / 2; the factor is left to the second axis.
__host__ __device__ constexpr int first_of(int row) { return row == 0 ? 0 : 1; }
__host__ __device__ constexpr int last_of(int row) { return row == 3 ? 3 : 2; }
__host__ __device__ constexpr float sign_of(int row) { return row == 1 ? 1.0f : -1.0f; }
constexpr float kInputScale = 0.25f;

// A row of A^T times four values, of which it does not use all.
__host__ __device__ constexpr float output(int row, float zero, float plus, float minus, float infinity) {
  return row == 0 ? zero + plus + minus : row == 1 ? plus - minus : plus + minus + infinity;
}

constexpr bool has_input(const float (&matrix)[kWindow][kWindow]) {
  for (int i = 0; i < kWindow; ++i) {
    for (int j = 0; j < kWindow; ++j) {
      if (matrix[i][j] != (j == first_of(i) ? 0.5f * sign_of(i) : j == last_of(i) ? 0.5f : 0.0f)) return false;
    }
  }
  return true;
}
constexpr bool has_output(const float (&matrix)[kTile][kWindow]) {
  for (int i = 0; i < kTile; ++i) {
    for (int j = 0; j < kWindow; ++j) {
      if (matrix[i][j] != output(i, j == 0, j == 1, j == 2, j == 3)) return false;
    }
  }
  return true;
}
static_assert(has_input(kInput) && has_output(kOutput), "F(3, 2) needs the points 0, 1, -1, infinity in this order");

// The tiles, numbered in the image, that make the outputs of the pixels from `first` to `first + size` along an axis.
struct Tiles {
  int64_t begin, end;
};
inline Tiles tiles_of(int32_t first, int32_t size) { return {first / kTile, (first + int64_t(size)) / kTile + 1}; }

}  // namespace wan::upsample
