// SPDX-License-Identifier: Apache-2.0
// Direct conv, stride 1, any taps: y[b,t,h,w,n] = sum_{i,j,k,c} x[b, t+i, h+j-pad_h, w+k-pad_w, c] * w[n,i,j,k,c]
// + bias[n] (+ residual[b,t,h,w,n]); x channels-last with any batch, frame and row stride, time never padded (causal
// history and halo rows lie in x), y and residual dense. Implicit GEMM, M = pixels, K = taps x C_in: A through im2col
// TMA, B through tiled TMA, persistent cooperative schedule. Bound: tensor cores; about 95 % of a cuBLAS matmul's rate.
#include "conv3d.cuh"

#include "sm90_gemm.cuh"

// CUTLASS's conv headers compile in this order only.
#include "cutlass/conv/dispatch_policy.hpp"

#include "cutlass/conv/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace wan::WAN_SM90 {

// The stock cooperative GEMM kernel refuses the stock conv mainloop's schedule tag; a tag of our own derived from the
// GEMM's satisfies both.
struct Schedule : cutlass::gemm::KernelTmaWarpSpecializedCooperative {};
using GemmShape = Shape<int, int, Shape<int, int, int, int>, int>;  // (pixels, C_out, (C_in, kw, kh, kt), 1)

template <int TileN>
struct Conv3d {
  using Tile = Shape<Int<kTileM>, Int<TileN>, Shape<Int<kTileK>>>;
  using FlatTile = Shape<Int<kTileM>, Int<TileN>, Int<kTileK>>;
  using AtomA = decltype(cutlass::gemm::collective::detail::ss_smem_selector<GMMA::Major::K, Element, Int<kTileM>,
                                                                             Int<kTileK>>());
  using AtomB =
      decltype(cutlass::gemm::collective::detail::ss_smem_selector<GMMA::Major::K, Element, Int<TileN>, Int<kTileK>>());
  static constexpr int kStages = cutlass::conv::collective::detail::compute_stage_count_or_override<
      cutlass::gemm::collective::detail::sm90_smem_capacity_bytes, Element, Element, FlatTile>(
      cutlass::conv::collective::StageCountAutoCarveout<sizeof(typename Epilogue<TileN>::SharedStorage)>{});
  static_assert(kStages >= 4, "fewer than four stages leave the tensor cores waiting for TMA");
  using SmemA = decltype(tile_to_shape(AtomA{}, Shape<Int<kTileM>, Int<kTileK>, Int<kStages>>{}, Step<_2, _1, _3>{}));
  using SmemB = decltype(tile_to_shape(AtomB{}, Shape<Int<TileN>, Int<kTileK>, Int<kStages>>{}, Step<_2, _1, _3>{}));
  using TiledMma =
      decltype(make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Tile, GMMA::Major::K, GMMA::Major::K>(),
                              Layout<Shape<_2, _1, _1>>{}));
  using CopyA =
      decltype(cutlass::conv::collective::detail::sm90_cluster_shape_to_im2col_tma_atom(size<1>(ClusterShape{})));
  using CopyB = decltype(cutlass::gemm::collective::detail::sm90_cluster_shape_to_tma_atom(size<0>(ClusterShape{})));
  using Base = cutlass::conv::collective::CollectiveConv<
      cutlass::conv::MainloopSm90TmaGmmaWarpSpecializedImplicitGemm<cutlass::conv::Operator::kFprop, kStages, 3,
                                                                    ClusterShape, Schedule>,
      Tile, Element, Element, TiledMma, cutlass::conv::collective::detail::Sm90ImplicitGemmTileTraits<CopyA, SmemA>,
      cutlass::conv::collective::detail::Sm90ImplicitGemmTileTraits<CopyB, SmemB>>;

  // The conv mainloop behind the interface that the GEMM kernel expects.
  struct Mainloop : Base {
    static constexpr uint32_t NumProducerThreadEvents = 1;
    using StrideA = Stride<int64_t, _1, int64_t>;  // the GEMM kernel looks only at the rank of these
    using StrideB = Stride<int64_t, _1, int64_t>;
    using Params = typename Base::Params;
    struct Arguments {
      ConvShape shape{};
      const Element* x = nullptr;
      const Element* w = nullptr;
    };
    static Params to_underlying_arguments(const GemmShape&, const Arguments& arguments, void* workspace) {
      return Base::to_underlying_arguments(arguments.shape, {arguments.x, arguments.w}, workspace);
    }
    static bool can_implement(const GemmShape&, const Arguments& arguments) {
      return Base::can_implement(arguments.shape, typename Base::Arguments{arguments.x, arguments.w});
    }
    template <class Problem>
    CUTLASS_DEVICE auto load_init(const Problem& problem, const Params& params) const {
      auto [a, b] = const_cast<Mainloop*>(this)->Base::load_init(problem, params);
      // The kernel reads the batch extent off B's fifth mode.
      return cute::make_tuple(a, make_tensor(b.data(), append(b.layout(), Layout<_1, _0>{})));
    }
    template <class TensorA, class TensorB, class Coordinate, class Iterator>
    CUTLASS_DEVICE void load(const Params& params, typename Base::MainloopPipeline pipeline,
                             typename Base::PipelineState state, const cute::tuple<TensorA, TensorB>& inputs,
                             const Coordinate& block, Iterator k_tiles, int count, int thread, uint32_t rank,
                             typename Base::TensorStorage& storage) {
      auto a = get<0>(inputs);
      auto b = get<1>(inputs)(_, _, _, _, _0{});
      Base::load(params, pipeline, state, cute::make_tuple(a, b), block, k_tiles, count, thread, rank, storage);
    }
  };
  using Kernel = cutlass::gemm::kernel::GemmUniversal<GemmShape, Mainloop, Epilogue<TileN>>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
};

template <int TileN>
int conv3d(const Conv3dProblem& p, const void* x, const void* w, const float* bias, const void* residual, void* y,
           int device, cudaStream_t stream) {
  using Gemm = typename Conv3d<TileN>::Gemm;
  const ConvShape shape = conv_shape(p);
  const int64_t pixels = output_pixels(p);
  const GemmShape problem{int(pixels), p.c_out, make_shape(p.c_in, p.taps_w, p.taps_h, p.taps_t), 1};
  StrideD stride{};
  get<0>(stride) = p.c_out;
  get<2>(stride) = pixels * p.c_out;
  typename Gemm::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGemm,
                                     problem,
                                     {shape, static_cast<const Element*>(x), static_cast<const Element*>(w)},
                                     epilogue_arguments<Epilogue<TileN>>(bias, residual, y, stride)};
  return launch<Gemm>(arguments, "conv3d", device, stream);
}

}  // namespace wan::WAN_SM90

WAN_EXPORT int WAN_SYMBOL(wan_conv3d)(const Conv3dProblem* problem, const void* x, const void* w, const float* bias,
                                      const void* residual, void* y, int tile_n, int device, cudaStream_t stream) {
  const Conv3dProblem& p = *problem;
  if (wan::check_conv3d(p, x, w, bias, residual, y)) return 1;
  wan::DeviceGuard guard(device);
  if (guard.check(device)) return 1;
  switch (tile_n) {
    case 128:
      return wan::WAN_SM90::conv3d<128>(p, x, w, bias, residual, y, device, stream);
    case 256:
      return wan::WAN_SM90::conv3d<256>(p, x, w, bias, residual, y, device, stream);
    default:
      return wan::fail("conv3d: no tile of %d columns", tile_n);
  }
}
