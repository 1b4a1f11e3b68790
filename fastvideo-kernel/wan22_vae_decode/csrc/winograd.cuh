// SPDX-License-Identifier: Apache-2.0
// One-dimensional transforms of Winograd's F(4, 3) in fp32, for points 0, +-p, +-q and infinity. Rows of opposite
// points differ only in the sign of their odd terms, which halves the products. The matrices come from winograd.py.
#pragma once
#include "vec8.cuh"
#include "winograd_matrices.cuh"  // written by the build

namespace wan::winograd {

constexpr int kTile = 4, kSize = 6, kComponents = 36;

static_assert(kInput01 == 0 && kInput03 == 0 && kInput05 == 0 && kInput50 == 0 && kInput52 == 0 && kInput54 == 0 &&
                  kInput10 == 0 && kInput15 == 0 && kInput30 == 0 && kInput35 == 0,
              "the input matrix needs the points 0, +-p, +-q, infinity in this order");
static_assert(kInput21 == -kInput11 && kInput22 == kInput12 && kInput23 == -kInput13 && kInput24 == kInput14 &&
                  kInput41 == -kInput31 && kInput42 == kInput32 && kInput43 == -kInput33 && kInput44 == kInput34,
              "the input matrix needs opposite points");
static_assert(kOutput02 == kOutput01 && kOutput12 == -kOutput11 && kOutput22 == kOutput21 && kOutput32 == -kOutput31 &&
                  kOutput04 == kOutput03 && kOutput14 == -kOutput13 && kOutput24 == kOutput23 &&
                  kOutput34 == -kOutput33,
              "the output matrix needs opposite points");
static_assert(kOutput10 == 0 && kOutput20 == 0 && kOutput30 == 0 && kOutput05 == 0 && kOutput15 == 0 && kOutput25 == 0,
              "the output matrix needs 0 first and infinity last");

// Pairs of components that share their terms: 0 and infinity, +-p, +-q.
__host__ __device__ constexpr int pair_row(int pair, int which) { return pair == 0 ? 5 * which : 2 * pair - 1 + which; }

// A row of B^T is its last coefficient, a power of two, times coefficients that end in 1. Along columns that scale is
// left out, along rows both are applied at once.
constexpr float kScale[6] = {kInput04, kInput14, kInput24, kInput34, kInput44, kInput55};

// Rows pair_row(kPair, 0 and 1) of B^T times six inputs, without their scale. The outer pair needs all inputs, the
// others the middle four.
template <int kPair>
__device__ inline void input_pair(const float (&d)[6], float& first, float& second) {
  if constexpr (kPair == 0) {
    first = fmaf(kInput00 / kInput04, d[0], fmaf(kInput02 / kInput04, d[2], d[4]));
    second = fmaf(kInput51 / kInput55, d[1], fmaf(kInput53 / kInput55, d[3], d[5]));
  } else {
    constexpr float kEven = kPair == 1 ? kInput12 / kInput14 : kInput32 / kInput34;
    constexpr float kOdd = kPair == 1 ? kInput11 / kInput13 : kInput31 / kInput33;
    constexpr float kPoint = kPair == 1 ? kInput13 / kInput14 : kInput33 / kInput34;
    const float even = fmaf(kEven, d[2], d[4]), odd = fmaf(kOdd, d[1], d[3]);
    first = fmaf(kPoint, odd, even);
    second = fmaf(-kPoint, odd, even);
  }
}

// The same with scales: of these rows and of row kRow, that the inputs come from.
template <int kPair, int kRow>
__device__ inline void scaled_input_pair(const float (&d)[6], float& first, float& second) {
  constexpr float kFirst = kScale[kRow] * kScale[pair_row(kPair, 0)];
  if constexpr (kPair == 0) {
    constexpr float kSecond = kScale[kRow] * kInput55;
    first = fmaf(kFirst * (kInput00 / kInput04), d[0], fmaf(kFirst * (kInput02 / kInput04), d[2], kFirst * d[4]));
    second = fmaf(kSecond * (kInput51 / kInput55), d[1], fmaf(kSecond * (kInput53 / kInput55), d[3], kSecond * d[5]));
  } else {
    constexpr float kEven = kPair == 1 ? kInput12 / kInput14 : kInput32 / kInput34;
    constexpr float kOdd = kPair == 1 ? kInput11 / kInput13 : kInput31 / kInput33;
    constexpr float kPoint = kFirst * (kPair == 1 ? kInput13 / kInput14 : kInput33 / kInput34);
    const float even = kFirst * fmaf(kEven, d[2], d[4]), odd = fmaf(kOdd, d[1], d[3]);
    first = fmaf(kPoint, odd, even);
    second = fmaf(-kPoint, odd, even);
  }
}

// Row kRow of components from that row of the columns' transforms.
template <int kRow>
__device__ inline void input_row(const float (&d)[6], float (&v)[6]) {
  scaled_input_pair<0, kRow>(d, v[0], v[5]);
  scaled_input_pair<1, kRow>(d, v[1], v[2]);
  scaled_input_pair<2, kRow>(d, v[3], v[4]);
}

// Adds the part of a pair of components to four outputs; the first pair sets them.
template <int kPair>
__device__ inline void output_pair(float first, float second, float (&y)[4]) {
  if constexpr (kPair == 0) {
    y[0] = fmaf(kOutput00, first, y[0]);
    y[3] = fmaf(kOutput35, second, y[3]);
  } else {
    const float sum = first + second, difference = first - second;
    if constexpr (kPair == 1) {
      y[0] = kOutput01 * sum, y[1] = kOutput11 * difference;
      y[2] = kOutput21 * sum, y[3] = kOutput31 * difference;
    } else {
      y[0] = fmaf(kOutput03, sum, y[0]), y[1] = fmaf(kOutput13, difference, y[1]);
      y[2] = fmaf(kOutput23, sum, y[2]), y[3] = fmaf(kOutput33, difference, y[3]);
    }
  }
}

__device__ inline void output_transform(const float (&m)[6], float (&y)[4]) {
  output_pair<1>(m[1], m[2], y);
  output_pair<2>(m[3], m[4], y);
  output_pair<0>(m[0], m[5], y);
}

// Four neighbouring channels as one 8-byte access: the most whose tile fits the registers.
template <typename T>
__device__ inline void to_floats(uint2 bits, float (&values)[4]) {
  using T2 = typename Pair<T>::type;
  const float2 low = unpack(*reinterpret_cast<const T2*>(&bits.x));
  const float2 high = unpack(*reinterpret_cast<const T2*>(&bits.y));
  values[0] = low.x, values[1] = low.y, values[2] = high.x, values[3] = high.y;
}

// One 64-bit word: stores of a pair of words may be torn apart into two instructions.
template <typename T>
__device__ inline void store_floats(T* target, const float (&values)[4]) {
  using T2 = typename Pair<T>::type;
  const T2 low = Pair<T>::pack(values[0], values[1]), high = Pair<T>::pack(values[2], values[3]);
  const uint32_t words[2] = {*reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high)};
  *reinterpret_cast<uint64_t*>(target) = words[0] | uint64_t(words[1]) << 32;
}

}  // namespace wan::winograd
