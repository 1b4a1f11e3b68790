// SPDX-License-Identifier: Apache-2.0
// Types shared by the Blackwell tensor-core kernels, for sm_100a and sm_103a: tiles, schedules and the epilogue
//   D[m, n] = round(acc[m, n] + bias[n] + beta * R[m, n]),  acc, bias and the sum in fp32, R and D in the element type.
// A tile is 256 x TileN x 64, multiplied by two SMs that each hold half of A and of B, or 128 x TileN x 64 on one SM
// where there are no more rows. Tensor memory holds at least two accumulators: one tile is written while the next is
// computed.
#pragma once
#include "tensor_core.cuh"

// The collectives need the above.
#include "cutlass/conv/dispatch_policy.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/dispatch_policy.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"

#define WAN_SM100 WAN_SYMBOL(sm100)

namespace wan::WAN_SM100 {

using namespace cute;

constexpr int kTileK = 64;

struct TwoSms {
  static constexpr int kTileM = 256;
  using Cluster = Shape<_2, _1, _1>;
  using Gemm = cutlass::gemm::KernelTmaWarpSpecialized2SmSm100;
  using Conv = cutlass::conv::KernelImplicitTmaWarpSpecialized2SmSm100;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized2Sm;
};

struct OneSm {
  static constexpr int kTileM = 128;
  using Cluster = Shape<_1, _1, _1>;
  using Gemm = cutlass::gemm::KernelTmaWarpSpecialized1SmSm100;
  using Conv = cutlass::conv::KernelImplicitTmaWarpSpecialized1SmSm100;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized1Sm;
};

// Layout: the strides of D, or CUTLASS's layout tag where D's rows are the pixels of a conv. Output: its type.
template <class Sms, int TileN, class Layout, class Output = Element>
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, Shape<Int<Sms::kTileM>, Int<TileN>, Int<kTileK>>,
    typename Sms::Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, Element, Layout, 8, Output,
    Layout, 16 / sizeof(Output), typename Sms::Epilogue,
    cutlass::epilogue::fusion::LinCombPerColBias<Output, float, float, Element, float>>::CollectiveOp;

}  // namespace wan::WAN_SM100
