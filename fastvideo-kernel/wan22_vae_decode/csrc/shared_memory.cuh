// SPDX-License-Identifier: Apache-2.0
// Shared memory by its own 32-bit addresses, which spare the arithmetic of pointers: 8 and 16 bytes at once, copies
// from global memory that one thread asks for and the copy engine of sm_90 and later makes, and the barrier that counts
// their bytes (PTX ISA, cp.async.bulk and mbarrier). Both sides of a copy are aligned to 16 bytes.
#pragma once
#include <cstdint>

namespace wan {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Volatile, so that the compiler does not gather more of them than fit its registers.
__device__ inline uint2 load_shared8(uint32_t address) {
  uint2 bits;
  asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "r"(address));
  return bits;
}

__device__ inline uint4 load_shared16(uint32_t address) {
  uint4 bits;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "r"(address)
               : "memory");
  return bits;
}

__device__ inline void store_shared16(uint32_t address, uint4 bits) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(bits.x), "r"(bits.y), "r"(bits.z),
               "r"(bits.w)
               : "memory");
}

// By one thread, before a __syncthreads(): a phase ends when one thread has told its bytes and they have arrived.
__device__ inline void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ inline void copy_bulk(uint32_t target, const void* source, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Until the phase of this parity, 0 for the first, is over.
__device__ inline void wait_barrier(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Orders this thread's own writes to shared memory before copies that are asked for later.
__device__ inline void fence_before_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace wan
