// SPDX-License-Identifier: Apache-2.0
// Types shared by the sm_90a tensor-core kernels: element type, tile, cluster and the epilogue
//   D[m, n] = round(acc[m, n] + bias[n] + beta * R[m, n]),  acc, bias and the sum in fp32, R and D in the element type.
// A tile is 128 x TileN x 64, two consumer warpgroups of 64 rows each, two tiles of one cluster share B by multicast.
#pragma once
#include <cuda_runtime.h>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/kernel_hardware_info.hpp"

// The collectives need the above.
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "launch.cuh"

// Each element type has a namespace of its own: templates of the same name would be merged by the linker.
#if defined(WAN_FP16)
#define WAN_SYMBOL(name) name##_fp16
#define WAN_SM90 sm90_fp16
#elif defined(WAN_BF16)
#define WAN_SYMBOL(name) name##_bf16
#define WAN_SM90 sm90_bf16
#else
#error "compile with -DWAN_FP16 or -DWAN_BF16"
#endif

namespace wan::WAN_SM90 {

using namespace cute;

#if defined(WAN_FP16)
using Element = cutlass::half_t;
#else
using Element = cutlass::bfloat16_t;
#endif

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

// D[m, n] = round(acc[m, n]). Without R, shared memory has room for a whole tile on its way to D in two pieces, so that
// nothing waits for its write: with a short K the tensor cores idle for a good part of a tile's time while it is
// written. That pays for a stage less of operands.
template <int TileN>
using PlainEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Shape<Int<kTileM>, Int<TileN>, Int<kTileK>>, ClusterShape,
    Shape<Int<kTileM>, Int<TileN / 2>>, float, float, void, StrideD, 8, Element, StrideD, 8,
    cutlass::epilogue::TmaWarpSpecializedCooperative,
    cutlass::epilogue::fusion::ScaledAcc<Element, float>>::CollectiveOp;

template <int TileN>
typename PlainEpilogue<TileN>::Arguments plain_epilogue_arguments(void* d, StrideD stride) {
  typename PlainEpilogue<TileN>::Arguments arguments{{}, nullptr, stride, static_cast<Element*>(d), stride};
  arguments.thread.alpha = 1.0f;
  return arguments;
}

// `residual` may be null. Its descriptor must then still be valid, so it points at D and is never read (beta = 0).
template <int TileN>
typename Epilogue<TileN>::Arguments epilogue_arguments(const float* bias, const void* residual, void* d,
                                                       StrideD stride) {
  typename Epilogue<TileN>::Arguments arguments{
      {}, static_cast<const Element*>(residual ? residual : d), stride, static_cast<Element*>(d), stride};
  arguments.thread.alpha = 1.0f;
  arguments.thread.beta = residual ? 1.0f : 0.0f;
  arguments.thread.bias_ptr = bias;
  return arguments;
}

// Checks, fills in and launches a CUTLASS device kernel that needs no workspace.
template <class Gemm>
int launch(typename Gemm::Arguments& arguments, const char* name, int device, cudaStream_t stream) {
  arguments.hw_info.device_id = device;
  arguments.hw_info.sm_count = multiprocessors(device);
  Gemm gemm;
  cutlass::Status status = gemm.can_implement(arguments);
  if (status != cutlass::Status::kSuccess) {
    return fail("%s: problem refused: %s", name, cutlass::cutlassGetStatusString(status));
  }
  if (Gemm::get_workspace_size(arguments) != 0) return fail("%s: unexpected workspace", name);
  status = gemm.initialize(arguments, nullptr, stream);
  if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
  if (status != cutlass::Status::kSuccess) {
    return fail("%s: launch failed: %s (%s)", name, cutlass::cutlassGetStatusString(status),
                cudaGetErrorString(cudaGetLastError()));
  }
  return check_launch(name);
}

}  // namespace wan::WAN_SM90
