// SPDX-License-Identifier: Apache-2.0
// Batched GEMM whose K runs over taps and channels, summed in fp32 in one go:
//   d[l, m, n] = sum_{tap, c} a[l, m, tap, c] * b[l, n, tap, c] + bias[n] (+ residual[l, m, n])
// Every operand has free strides in l, m (n) and tap, so the windows of a may overlap: with stride_tap = one frame it
// is a causal temporal conv, with one tap a 1x1x1 conv, with 36 batches the products of F(4x4,3x3) Winograd. Tiled TMA
// for both operands, persistent schedule. Bound: tensor cores, and with all of them busy the card's power: a sustained
// run lowers the clock.
#include "tap_gemm.cuh"

#include "sm90_gemm.cuh"

#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace wan::WAN_SM90 {

using TapStride = Stride<int64_t, Stride<_1, int64_t>, int64_t>;  // (M or N, (channel, tap), batch)
using TapShape = Shape<int, int, Shape<int, int>, int>;

template <class Tile, class Schedule, class EpilogueOp>
struct TapGemm {
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, TapStride, 8, Element, TapStride, 8, float,
      decltype(make_shape(get<0>(Tile{}), get<1>(Tile{}), make_shape(get<2>(Tile{}), _1{}))), ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<sizeof(typename EpilogueOp::SharedStorage)>,
      Schedule>::CollectiveOp;
  static_assert(Mainloop::DispatchPolicy::Stages >= 3,
                "fewer than three stages leave the tensor cores waiting for TMA");
  using Kernel = cutlass::gemm::kernel::GemmUniversal<TapShape, Mainloop, EpilogueOp>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
};

template <class Tile, class Schedule, class EpilogueOp>
int run_tap_gemm(const TapGemmProblem& p, const void* a, const void* b, typename EpilogueOp::Arguments epilogue,
                 int device, cudaStream_t stream) {
  using Gemm = typename TapGemm<Tile, Schedule, EpilogueOp>::Gemm;
  const TapStride stride_a{p.a_stride_m, {_1{}, p.a_stride_tap}, p.a_stride_batch};
  const TapStride stride_b{p.b_stride_n, {_1{}, p.b_stride_tap}, p.b_stride_batch};
  typename Gemm::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGemm,
      TapShape{p.m, p.n, make_shape(p.channels, p.taps), p.batch},
      {static_cast<const Element*>(a), stride_a, static_cast<const Element*>(b), stride_b},
      epilogue};
  return launch<Gemm>(arguments, "tap_gemm", device, stream);
}

// Without bias and residual, in one tile for every problem.
template <class Output>
int plain_gemm(const TapGemmProblem& p, const void* a, const void* b, void* d, int device, cudaStream_t stream) {
  const StrideD stride{p.d_stride_m, _1{}, p.d_stride_batch};
  typename PlainEpilogue<Output>::Arguments epilogue{{}, nullptr, stride, static_cast<Output*>(d), stride};
  epilogue.thread.alpha = 1.0f;
  return run_tap_gemm<PlainTile, cutlass::gemm::KernelTmaWarpSpecializedPingpong, PlainEpilogue<Output>>(
      p, a, b, epilogue, device, stream);
}

template <int TileN>
int tap_gemm(const TapGemmProblem& p, const void* a, const void* b, const float* bias, const void* residual, void* d,
             int device, cudaStream_t stream) {
  const StrideD stride{p.d_stride_m, _1{}, p.d_stride_batch};
  using Tile = Shape<Int<kTileM>, Int<TileN>, Int<kTileK>>;
  return run_tap_gemm<Tile, cutlass::gemm::KernelTmaWarpSpecializedCooperative, Epilogue<TileN>>(
      p, a, b, epilogue_arguments<Epilogue<TileN>>(bias, residual, d, stride), device, stream);
}

}  // namespace wan::WAN_SM90

WAN_EXPORT int WAN_SYMBOL(wan_tap_gemm)(const TapGemmProblem* problem, const void* a, const void* b, const float* bias,
                                        const void* residual, void* d, int d_dtype, int tile_n, int device,
                                        cudaStream_t stream) {
  const TapGemmProblem& p = *problem;
  if (wan::check_tap_gemm(p, a, b, bias, residual, d, wan::kElement, d_dtype)) return 1;
  wan::DeviceGuard guard(device);
  if (guard.check(device)) return 1;
  if (d_dtype == wan::kFp32) return wan::WAN_SM90::plain_gemm<float>(p, a, b, d, device, stream);
  if (bias == nullptr && residual == nullptr) {
    return wan::WAN_SM90::plain_gemm<wan::Element>(p, a, b, d, device, stream);
  }
  switch (tile_n) {
    case 128:
      return wan::WAN_SM90::tap_gemm<128>(p, a, b, bias, residual, d, device, stream);
    case 256:
      return wan::WAN_SM90::tap_gemm<256>(p, a, b, bias, residual, d, device, stream);
    default:
      return wan::fail("tap_gemm: no tile of %d columns", tile_n);
  }
}
