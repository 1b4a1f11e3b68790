// SPDX-License-Identifier: Apache-2.0
// The error message of the last launcher that failed on the calling thread.
#include <cstdarg>
#include <cstdio>

#include "launch.cuh"

namespace wan {

static thread_local char last_error[512] = "";

int fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return 1;
}

}  // namespace wan

WAN_EXPORT const char* wan_last_error() { return wan::last_error; }
