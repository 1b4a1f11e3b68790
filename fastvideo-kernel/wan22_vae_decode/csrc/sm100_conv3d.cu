// SPDX-License-Identifier: Apache-2.0
// The direct conv (conv3d.cuh) on Blackwell. Implicit GEMM, M = pixels, K = taps x C_in: A through im2col TMA, B
// through tiled TMA, y and residual through im2col TMA with a single tap, tcgen05 products of one or two SMs, tiles
// handed out by the hardware. Bound: tensor cores. Not run yet: no such card was at hand.
#include "conv3d.cuh"

#include "sm100_gemm.cuh"

#include "cutlass/conv/collective/collective_builder.hpp"
#include "cutlass/conv/device/conv_universal_adapter.hpp"
#include "cutlass/conv/kernel/conv_universal.hpp"

namespace wan::WAN_SM100 {

template <class Sms, int TileN>
struct Conv3d {
  using Layout = cutlass::layout::TensorNDHWC;
  using EpilogueOp = Epilogue<Sms, TileN, Layout>;
  using Mainloop = typename cutlass::conv::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, cutlass::conv::Operator::kFprop, Element, Layout, 8,
      Element, Layout, 8, float, Shape<Int<Sms::kTileM>, Int<TileN>, Shape<Int<kTileK>>>, typename Sms::Cluster,
      cutlass::conv::collective::StageCountAutoCarveout<sizeof(typename EpilogueOp::SharedStorage)>,
      typename Sms::Conv>::CollectiveOp;
  static_assert(Mainloop::DispatchPolicy::Stages >= 4, "fewer than four stages leave the tensor cores waiting for TMA");
  using Kernel = cutlass::conv::kernel::ConvUniversal<ConvShape, Mainloop, EpilogueOp>;
  using Conv = cutlass::conv::device::ConvUniversalAdapter<Kernel>;
};

template <class Sms, int TileN>
int conv3d(const Conv3dProblem& p, const void* x, const void* w, const float* bias, const void* residual, void* y,
           int device, cudaStream_t stream) {
  using Conv = typename Conv3d<Sms, TileN>::Conv;
  using EpilogueOp = typename Conv3d<Sms, TileN>::EpilogueOp;
  const ConvShape shape = conv_shape(p);
  typename EpilogueOp::StrideD stride{};  // ((column, row, frame, batch), C_out, 1)
  get<0, 0>(stride) = shape.stride_C[3];
  get<0, 1>(stride) = shape.stride_C[2];
  get<0, 2>(stride) = shape.stride_C[1];
  get<0, 3>(stride) = shape.stride_C[0];
  typename Conv::Arguments arguments{shape,
                                     {static_cast<const Element*>(x), static_cast<const Element*>(w)},
                                     epilogue_arguments<EpilogueOp>(bias, residual, y, stride)};
  return launch<Conv>(arguments, "conv3d", device, stream);
}

}  // namespace wan::WAN_SM100

WAN_EXPORT int WAN_SYMBOL(wan_conv3d)(const Conv3dProblem* problem, const void* x, const void* w, const float* bias,
                                      const void* residual, void* y, int tile_n, int device, cudaStream_t stream) {
  using namespace wan::WAN_SM100;
  const Conv3dProblem& p = *problem;
  if (wan::check_conv3d(p, x, w, bias, residual, y)) return 1;
  wan::DeviceGuard guard(device);
  if (guard.check(device)) return 1;
  switch (tile_n) {
    case 128:
      return wan::output_pixels(p) > OneSm::kTileM ? conv3d<TwoSms, 128>(p, x, w, bias, residual, y, device, stream)
                                                   : conv3d<OneSm, 128>(p, x, w, bias, residual, y, device, stream);
    case 256:
      return conv3d<TwoSms, 256>(p, x, w, bias, residual, y, device, stream);
    default:
      return wan::fail("conv3d: no tile of %d columns", tile_n);
  }
}
