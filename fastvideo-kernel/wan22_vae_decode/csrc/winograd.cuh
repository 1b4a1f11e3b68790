// SPDX-License-Identifier: Apache-2.0
// One-dimensional transforms of Winograd's F(4, 3), for points 0, +-p, +-q and infinity, and F(3, 3), for +-p, +-q and
// infinity, in fp32. Tiles have four rows and four or three columns. Rows of opposite points differ only in the sign of
// half of their terms, which halves the products. The matrices come from winograd.py.
#pragma once
#include "vec8.cuh"
#include "winograd_matrices.cuh"  // written by the build

namespace wan::winograd {

constexpr int kTileRows = 4, kLines = kTileRows + 2;  // of pixels that a tile reads, and of components

// Rows of B^T for opposite points in the order +, -, with the same odd or even zeros.
__host__ __device__ constexpr bool opposite(const float (&plus)[6], const float (&minus)[6]) {
  return plus[0] == 0 && plus[5] == 0 && minus[0] == 0 && minus[5] == 0 && minus[1] == -plus[1] &&
         minus[2] == plus[2] && minus[3] == -plus[3] && minus[4] == plus[4];
}
__host__ __device__ constexpr bool opposite(const float (&plus)[5], const float (&minus)[5]) {
  return plus[4] == 0 && minus[4] == 0 && minus[0] == -plus[0] && minus[1] == plus[1] && minus[2] == -plus[2] &&
         minus[3] == plus[3];
}
static_assert(opposite(f4::kInput[1], f4::kInput[2]) && opposite(f4::kInput[3], f4::kInput[4]) &&
                  f4::kInput[0][1] == 0 && f4::kInput[0][3] == 0 && f4::kInput[0][5] == 0 && f4::kInput[5][0] == 0 &&
                  f4::kInput[5][2] == 0 && f4::kInput[5][4] == 0,
              "F(4, 3) needs the points 0, +-p, +-q, infinity in this order");
static_assert(opposite(f3::kInput[0], f3::kInput[1]) && opposite(f3::kInput[2], f3::kInput[3]) &&
                  f3::kInput[4][1] == 0 && f3::kInput[4][3] == 0,
              "F(3, 3) needs the points +-p, +-q, infinity in this order");

// Columns of A^T of a point and its opposite.
template <int kOutputs, int kSize>
__host__ __device__ constexpr bool opposite_outputs(const float (&matrix)[kOutputs][kSize], int column) {
  bool result = true;
  for (int row = 0; row < kOutputs; ++row) {
    result = result && matrix[row][column + 1] == (row % 2 ? -1 : 1) * matrix[row][column];
  }
  return result;
}
static_assert(opposite_outputs(f4::kOutput, 1) && opposite_outputs(f4::kOutput, 3) && f4::kOutput[1][0] == 0 &&
                  f4::kOutput[2][0] == 0 && f4::kOutput[3][0] == 0 && f4::kOutput[0][5] == 0 &&
                  f4::kOutput[1][5] == 0 && f4::kOutput[2][5] == 0 && opposite_outputs(f3::kOutput, 0) &&
                  opposite_outputs(f3::kOutput, 2) && f3::kOutput[0][4] == 0 && f3::kOutput[1][4] == 0,
              "outputs of opposite points have the signs of odd powers");

// Entries as scalars: device code has no arrays of constants.
template <int kRow, int kColumn>
constexpr float kInput4 = f4::kInput[kRow][kColumn];
template <int kRow, int kColumn>
constexpr float kOutput4 = f4::kOutput[kRow][kColumn];
template <int kRow, int kColumn>
constexpr float kInput3 = f3::kInput[kRow][kColumn];
template <int kRow, int kColumn>
constexpr float kOutput3 = f3::kOutput[kRow][kColumn];

// Pairs of components of F(4, 3) that share their terms: 0 and infinity, +-p, +-q.
__host__ __device__ constexpr int pair_row(int pair, int which) { return pair == 0 ? 5 * which : 2 * pair - 1 + which; }

// A row of B^T is its last coefficient, a power of two, times coefficients that end in 1. Down the rows of pixels that
// scale is left out, across them both are applied at once.
template <int kRow>
constexpr float kRowScale = kInput4<kRow, (kRow == 5 ? 5 : 4)>;

// Rows pair_row(kPair, 0 and 1) of B^T of F(4, 3) times six inputs, with these scales instead of their own (constants
// after inlining). The outer pair needs all inputs, the others the middle four.
template <int kPair>
__device__ inline void input_pair(const float (&d)[6], float first_scale, float second_scale, float& first,
                                  float& second) {
  if constexpr (kPair == 0) {
    constexpr float kFirst0 = kInput4<0, 0> / kInput4<0, 4>, kFirst2 = kInput4<0, 2> / kInput4<0, 4>;
    constexpr float kSecond1 = kInput4<5, 1> / kInput4<5, 5>, kSecond3 = kInput4<5, 3> / kInput4<5, 5>;
    first = fmaf(first_scale * kFirst0, d[0], fmaf(first_scale * kFirst2, d[2], first_scale * d[4]));
    second = fmaf(second_scale * kSecond1, d[1], fmaf(second_scale * kSecond3, d[3], second_scale * d[5]));
  } else {
    constexpr int kRow = 2 * kPair - 1;
    constexpr float kEven = kInput4<kRow, 2> / kInput4<kRow, 4>, kOdd = kInput4<kRow, 1> / kInput4<kRow, 3>;
    constexpr float kPoint = kInput4<kRow, 3> / kInput4<kRow, 4>;
    const float even = first_scale * fmaf(kEven, d[2], d[4]), odd = fmaf(kOdd, d[1], d[3]);
    first = fmaf(first_scale * kPoint, odd, even);
    second = fmaf(-first_scale * kPoint, odd, even);
  }
}

// Row kRow of components, from that row of the transforms down the columns of pixels: four outputs across.
template <int kRow>
__device__ inline void input_row(const float (&d)[6], float (&v)[6]) {
  constexpr float kScale = kRowScale<kRow>;
  input_pair<0>(d, kScale * kRowScale<0>, kScale * kRowScale<5>, v[0], v[5]);
  input_pair<1>(d, kScale * kRowScale<1>, kScale * kRowScale<2>, v[1], v[2]);
  input_pair<2>(d, kScale * kRowScale<3>, kScale * kRowScale<4>, v[3], v[4]);
}

// A pair of opposite points of F(3, 3): rows (-p q^2, -q^2, p, 1, 0) of B^T, with the signs of p.
template <int kPair>
__device__ inline void input_pair_of_3(const float (&d)[5], float scale, float& first, float& second) {
  constexpr int kRow = 2 * kPair;
  constexpr float kLow = kInput3<kRow, 1> / kInput3<kRow, 3>;
  constexpr float kPoint = kInput3<kRow, 2> / kInput3<kRow, 3>;
  scale *= kInput3<kRow, 3>;
  const float even = fmaf(kLow, d[0], d[2]), odd = scale * fmaf(kLow, d[1], d[3]);
  first = fmaf(scale * kPoint, even, odd);
  second = fmaf(-scale * kPoint, even, odd);
}

// Three outputs across.
template <int kRow>
__device__ inline void input_row(const float (&d)[5], float (&v)[5]) {
  constexpr float kScale = kRowScale<kRow>;
  input_pair_of_3<0>(d, kScale, v[0], v[1]);
  input_pair_of_3<1>(d, kScale, v[2], v[3]);
  v[4] = fmaf(kScale * kInput3<4, 0>, d[0], fmaf(kScale * kInput3<4, 2>, d[2], kScale * kInput3<4, 4> * d[4]));
}

// Adds the part of a pair of components to four outputs; the first pair sets them.
template <int kPair>
__device__ inline void output_pair(float first, float second, float (&y)[4]) {
  if constexpr (kPair == 0) {
    y[0] = fmaf(kOutput4<0, 0>, first, y[0]);
    y[3] = fmaf(kOutput4<3, 5>, second, y[3]);
  } else {
    const float sum = first + second, difference = first - second;
    if constexpr (kPair == 1) {
      y[0] = kOutput4<0, 1> * sum, y[1] = kOutput4<1, 1> * difference;
      y[2] = kOutput4<2, 1> * sum, y[3] = kOutput4<3, 1> * difference;
    } else {
      y[0] = fmaf(kOutput4<0, 3>, sum, y[0]), y[1] = fmaf(kOutput4<1, 3>, difference, y[1]);
      y[2] = fmaf(kOutput4<2, 3>, sum, y[2]), y[3] = fmaf(kOutput4<3, 3>, difference, y[3]);
    }
  }
}

// Outputs across a tile from a row of components: four, or three.
__device__ inline void output_row(const float (&m)[6], float (&y)[4]) {
  output_pair<1>(m[1], m[2], y);
  output_pair<2>(m[3], m[4], y);
  output_pair<0>(m[0], m[5], y);
}

__device__ inline void output_row(const float (&m)[5], float (&y)[3]) {
  const float sum0 = m[0] + m[1], difference0 = m[0] - m[1], sum1 = m[2] + m[3], difference1 = m[2] - m[3];
  y[0] = fmaf(kOutput3<0, 0>, sum0, kOutput3<0, 2> * sum1);
  y[1] = fmaf(kOutput3<1, 0>, difference0, kOutput3<1, 2> * difference1);
  y[2] = fmaf(kOutput3<2, 0>, sum0, fmaf(kOutput3<2, 2>, sum1, kOutput3<2, 4> * m[4]));
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
