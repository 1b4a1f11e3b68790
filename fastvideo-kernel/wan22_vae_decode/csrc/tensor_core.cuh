// SPDX-License-Identifier: Apache-2.0
// What the tensor-core kernels of every architecture share: the element type and the launch of a CUTLASS device kernel
// whose epilogue is D[m, n] = round(acc[m, n] + bias[n] + beta * R[m, n]), the sum in fp32.
#pragma once
#include <cuda_runtime.h>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/kernel_hardware_info.hpp"
#include "launch.cuh"

// Each unit is compiled once for every element type. A name and a namespace get the type as a suffix: templates of the
// same name would be merged by the linker.
#if defined(WAN_FP16)
#define WAN_SYMBOL(name) name##_fp16
#elif defined(WAN_BF16)
#define WAN_SYMBOL(name) name##_bf16
#else
#error "compile with -DWAN_FP16 or -DWAN_BF16"
#endif

namespace wan {

#if defined(WAN_FP16)
using Element = cutlass::half_t;
constexpr Dtype kElement = kFp16;
#else
using Element = cutlass::bfloat16_t;
constexpr Dtype kElement = kBf16;
#endif

// `residual` may be null. Its descriptor must then still be valid, so it points at D and is never read (beta = 0).
template <class EpilogueOp>
typename EpilogueOp::Arguments epilogue_arguments(const float* bias, const void* residual, void* d,
                                                  typename EpilogueOp::StrideD stride) {
  typename EpilogueOp::Arguments arguments{{},
                                           static_cast<const typename EpilogueOp::ElementC*>(residual ? residual : d),
                                           stride,
                                           static_cast<typename EpilogueOp::ElementD*>(d),
                                           stride};
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

}  // namespace wan
