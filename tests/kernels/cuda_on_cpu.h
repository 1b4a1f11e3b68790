// SPDX-License-Identifier: Apache-2.0
// Enough of CUDA to run a kernel's source on a CPU: every thread of a block is
// a fiber, barriers and shuffles switch to the next one. Included before the
// source, whose launches, inline assembly and shared memory the test rewrites.
#pragma once
#include <cuda_runtime.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#undef __launch_bounds__
#undef __grid_constant__
#define __launch_bounds__(...)
#define __grid_constant__

namespace on_cpu {

struct Barrier {
  int arrived = 0, generation = 0;
};

struct Block {
  static constexpr size_t kStack = 64 << 10;
  std::vector<ucontext_t> fibers;
  std::vector<bool> finished;
  std::vector<char> stacks;
  ucontext_t scheduler;
  std::vector<Barrier> warps;
  Barrier all;
  std::vector<float> lanes;
  size_t current = 0;
  const std::function<void()>* body = nullptr;
};

inline Block block;
inline std::vector<uint4> shared;

}  // namespace on_cpu

inline dim3 blockIdx, blockDim, gridDim, threadIdx;

namespace on_cpu {

inline void yield() { swapcontext(&block.fibers[block.current], &block.scheduler); }

inline void wait(Barrier& barrier, int count) {
  const int generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) yield();
}

inline void fiber() {
  (*block.body)();
  block.finished[block.current] = true;
  while (true) yield();
}

inline void run_block(size_t threads, const std::function<void()>& body) {
  block.fibers.resize(threads);
  block.finished.assign(threads, false);
  block.stacks.resize(threads * Block::kStack);
  block.warps.assign((threads + 31) / 32, Barrier{});
  block.all = Barrier{};
  block.lanes.assign(threads, 0.0f);
  block.body = &body;
  for (size_t thread = 0; thread < threads; ++thread) {
    getcontext(&block.fibers[thread]);
    block.fibers[thread].uc_stack.ss_sp = &block.stacks[thread * Block::kStack];
    block.fibers[thread].uc_stack.ss_size = Block::kStack;
    block.fibers[thread].uc_link = nullptr;
    makecontext(&block.fibers[thread], fiber, 0);
  }
  for (bool running = true; running;) {
    running = false;
    for (size_t thread = 0; thread < threads; ++thread) {
      if (block.finished[thread]) continue;
      running = true;
      block.current = thread;
      threadIdx = dim3(static_cast<unsigned>(thread));
      swapcontext(&block.scheduler, &block.fibers[thread]);
    }
  }
}

template <typename Kernel, typename... Arguments>
void launch(Kernel kernel, dim3 grid, dim3 threads, size_t bytes, const Arguments&... arguments) {
  gridDim = grid;
  blockDim = threads;
  const std::function<void()> body = [&] { kernel(arguments...); };
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        // NaN in every type: a block may read only what it wrote.
        shared.resize((bytes + 15) / 16);
        std::memset(static_cast<void*>(shared.data()), 0xff, 16 * shared.size());
        run_block(threads.x, body);
      }
    }
  }
}

inline uint4* shared_memory() { return shared.data(); }

}  // namespace on_cpu

inline void __syncthreads() { on_cpu::wait(on_cpu::block.all, static_cast<int>(blockDim.x)); }

namespace on_cpu {

// Another thread's value, of those that all threads of a warp bring.
inline float exchange(float value, size_t source) {
  const size_t thread = block.current;
  block.lanes[thread] = value;
  wait(block.warps[thread / 32], 32);
  const float other = block.lanes[source];
  wait(block.warps[thread / 32], 32);
  return other;
}

}  // namespace on_cpu

inline float __shfl_xor_sync(unsigned, float value, int distance) {
  return on_cpu::exchange(value, on_cpu::block.current ^ distance);
}

inline int __shfl_sync(unsigned, int value, int lane) {
  return static_cast<int>(on_cpu::exchange(static_cast<float>(value), on_cpu::block.current / 32 * 32 + lane));
}

inline void __syncwarp() { on_cpu::wait(on_cpu::block.warps[on_cpu::block.current / 32], 32); }

// What `shared_memory.cuh` has. Addresses are offsets, and one outside of
// shared memory ends the test. A barrier is the number of its phase and, in the
// lower half, the bytes that it awaits; a copy is made when somebody waits, as
// late as it may be.
namespace on_cpu {

inline char* at(uint32_t address, uint32_t bytes) {
  if (address % std::min(bytes, 16u) || address + bytes > 16 * shared.size()) abort();
  return reinterpret_cast<char*>(shared.data()) + address;
}

struct Copy {
  uint32_t target;
  const void* source;
  uint32_t bytes;
  uint64_t* barrier;
};
inline std::vector<Copy> copies;

}  // namespace on_cpu

namespace wan {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - reinterpret_cast<char*>(on_cpu::shared.data()));
}
inline uint2 load_shared8(uint32_t address) { return *reinterpret_cast<uint2*>(on_cpu::at(address, 8)); }
inline uint4 load_shared16(uint32_t address) { return *reinterpret_cast<uint4*>(on_cpu::at(address, 16)); }
inline void store_shared16(uint32_t address, uint4 bits) { *reinterpret_cast<uint4*>(on_cpu::at(address, 16)) = bits; }

inline void init_barrier(uint64_t* barrier) { *barrier = 0; }
inline void expect_bytes(uint64_t* barrier, uint32_t bytes) { *barrier += bytes == 0 ? uint64_t(1) << 32 : bytes; }
inline void copy_bulk(uint32_t target, const void* source, uint32_t bytes, uint64_t* barrier) {
  if (bytes % 16 || target % 16 || reinterpret_cast<uintptr_t>(source) % 16) abort();
  on_cpu::copies.push_back({target, source, bytes, barrier});
}
inline void wait_barrier(uint64_t* barrier, uint32_t parity) {
  while ((*barrier >> 32) % 2 == parity) {
    for (const on_cpu::Copy& copy : std::exchange(on_cpu::copies, {})) {
      std::memcpy(on_cpu::at(copy.target, copy.bytes), copy.source, copy.bytes);
      *copy.barrier -= copy.bytes;
      if (static_cast<uint32_t>(*copy.barrier) == 0) *copy.barrier += uint64_t(1) << 32;
    }
    on_cpu::yield();
  }
}
inline void fence_before_copies() {}

}  // namespace wan

inline unsigned __ballot_sync(unsigned, bool vote) {
  const size_t thread = on_cpu::block.current, first = thread / 32 * 32;
  on_cpu::block.lanes[thread] = vote;
  on_cpu::wait(on_cpu::block.warps[thread / 32], 32);
  unsigned votes = 0;
  for (size_t lane = 0; lane < 32; ++lane) votes |= unsigned(on_cpu::block.lanes[first + lane] != 0) << lane;
  on_cpu::wait(on_cpu::block.warps[thread / 32], 32);
  return votes;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }

template <typename T>
T __ldg(const T* pointer) {
  return *pointer;
}

using std::min;

extern "C" float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

// The runtime, without a driver.
extern "C" {
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "no error"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 1, cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
