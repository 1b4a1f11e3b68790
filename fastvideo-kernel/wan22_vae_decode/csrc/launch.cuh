// SPDX-License-Identifier: Apache-2.0
// What every launcher shares: it returns 0, or 1 with the reason in wan_last_error(); it runs on the device and the
// stream it is given and leaves the caller's current device as it was; it never waits for the GPU.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#define WAN_EXPORT extern "C" __attribute__((visibility("default")))

namespace wan {

// Element types as the Python side numbers them.
enum Dtype : int32_t { kFp16 = 0, kBf16 = 1, kFp32 = 2, kUint8 = 3 };

// Records a printf-style message for wan_last_error() of this thread; always returns 1.
int fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Returns 0 if the launch just made was accepted.
inline int check_launch(const char* kernel) {
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? 0 : fail("%s: launch refused: %s", kernel, cudaGetErrorString(status));
}

inline bool is_aligned16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    status_ = cudaGetDevice(&previous_);
    if (status_ == cudaSuccess && previous_ != device) status_ = cudaSetDevice(device);
    restore_ = status_ == cudaSuccess && previous_ != device;
  }
  ~DeviceGuard() {
    if (restore_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  int check(int device) const {
    return status_ == cudaSuccess ? 0 : fail("cannot use CUDA device %d: %s", device, cudaGetErrorString(status_));
  }

 private:
  cudaError_t status_;
  int previous_ = 0;
  bool restore_ = false;
};

inline int multiprocessors(int device) {
  int count = 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

inline int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

}  // namespace wan
