// SPDX-License-Identifier: Apache-2.0
// The tap GEMM (tap_gemm.cuh) on Blackwell. K runs over taps and channels, summed in fp32 in tensor memory; the windows
// of a may overlap. Tiled TMA for both operands, tcgen05 products of one or two SMs, tiles handed out by the hardware.
// Bound: tensor cores. Not run yet: no such card was at hand.
#include "tap_gemm.cuh"

#include "sm100_gemm.cuh"

#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace wan::WAN_SM100 {

using TapStride = Stride<int64_t, Stride<_1, int64_t>, int64_t>;  // (M or N, (channel, tap), batch)
using TapShape = Shape<int, int, Shape<int, int>, int>;
using OutputStride = Stride<int64_t, _1, int64_t>;  // (M, N, batch)

template <class Sms, int TileN, class Output>
struct TapGemm {
  using EpilogueOp = Epilogue<Sms, TileN, OutputStride, Output>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, Element, TapStride, 8, Element, TapStride, 8, float,
      Shape<Int<Sms::kTileM>, Int<TileN>, Shape<Int<kTileK>, _1>>, typename Sms::Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<sizeof(typename EpilogueOp::SharedStorage)>,
      typename Sms::Gemm>::CollectiveOp;
  static_assert(Mainloop::DispatchPolicy::Stages >= 4, "fewer than four stages leave the tensor cores waiting for TMA");
  using Kernel = cutlass::gemm::kernel::GemmUniversal<TapShape, Mainloop, EpilogueOp>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
};

template <class Sms, int TileN, class Output = Element>
int tap_gemm(const TapGemmProblem& p, const void* a, const void* b, const float* bias, const void* residual, void* d,
             int device, cudaStream_t stream) {
  using Gemm = typename TapGemm<Sms, TileN, Output>::Gemm;
  const TapStride stride_a{p.a_stride_m, {_1{}, p.a_stride_tap}, p.a_stride_batch};
  const TapStride stride_b{p.b_stride_n, {_1{}, p.b_stride_tap}, p.b_stride_batch};
  const OutputStride stride_d{p.d_stride_m, _1{}, p.d_stride_batch};
  typename Gemm::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGemm,
      TapShape{p.m, p.n, make_shape(p.channels, p.taps), p.batch},
      {static_cast<const Element*>(a), stride_a, static_cast<const Element*>(b), stride_b},
      epilogue_arguments<typename TapGemm<Sms, TileN, Output>::EpilogueOp>(bias, residual, d, stride_d)};
  return launch<Gemm>(arguments, "tap_gemm", device, stream);
}

}  // namespace wan::WAN_SM100

WAN_EXPORT int WAN_SYMBOL(wan_tap_gemm)(const TapGemmProblem* problem, const void* a, const void* b, const float* bias,
                                        const void* residual, void* d, int d_dtype, int tile_n, int device,
                                        cudaStream_t stream) {
  using namespace wan::WAN_SM100;
  const TapGemmProblem& p = *problem;
  if (wan::check_tap_gemm(p, a, b, bias, residual, d, wan::kElement, d_dtype)) return 1;
  wan::DeviceGuard guard(device);
  if (guard.check(device)) return 1;
  if (d_dtype == wan::kFp32) return tap_gemm<TwoSms, 256, float>(p, a, b, bias, residual, d, device, stream);
  switch (tile_n) {
    case 128:
      return p.m > OneSm::kTileM ? tap_gemm<TwoSms, 128>(p, a, b, bias, residual, d, device, stream)
                                 : tap_gemm<OneSm, 128>(p, a, b, bias, residual, d, device, stream);
    case 256:
      return tap_gemm<TwoSms, 256>(p, a, b, bias, residual, d, device, stream);
    default:
      return wan::fail("tap_gemm: no tile of %d columns", tile_n);
  }
}
