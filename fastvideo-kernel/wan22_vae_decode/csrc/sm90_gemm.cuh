// SPDX-License-Identifier: Apache-2.0
// Types shared by the sm_90a tensor-core kernels: element type, tile, cluster and the epilogue
//   D[m, n] = round(acc[m, n] + bias[n] + beta * R[m, n]),  acc, bias and the sum in fp32, R and D in the element type.
// A tile is 128 x TileN x 64, two consumer warpgroups of 64 rows each, two tiles of one cluster share B by multicast.
#pragma once
#include "tensor_core.cuh"

// The collectives need the above.
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"

#define WAN_SM90 WAN_SYMBOL(sm90)

namespace wan::WAN_SM90 {

using namespace cute;

constexpr int kTileM = 128;
constexpr int kTileK = 64;
using ClusterShape = Shape<_2, _1, _1>;
using StrideD = Stride<int64_t, _1, int64_t>;  // (M, N, batch)

template <int TileN>
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Shape<Int<kTileM>, Int<TileN>, Int<kTileK>>, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, Element, StrideD, 8, Element, StrideD, 8,
    cutlass::epilogue::TmaWarpSpecializedCooperative,
    cutlass::epilogue::fusion::LinCombPerColBias<Element, float, float, Element, float>>::CollectiveOp;

// D[m, n] = acc[m, n], rounded to the type of D, for the products of Winograd convs, whose K is short: the tensor cores
// would idle for a good part of a tile's time while it is written. So each warpgroup has a tile of its own (ping-pong),
// and one multiplies while the other writes. Tiles of 64 x 256 are slower at every width.
using PlainTile = Shape<Int<kTileM>, _128, Int<kTileK>>;
template <class Output>
using PlainEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, PlainTile, ClusterShape, Shape<_64, Int<128 / sizeof(Output)>>,
    float, float, void, StrideD, 16 / sizeof(Output), Output, StrideD, 16 / sizeof(Output),
    cutlass::epilogue::TmaWarpSpecialized, cutlass::epilogue::fusion::ScaledAcc<Output, float>>::CollectiveOp;

}  // namespace wan::WAN_SM90
