# SPDX-License-Identifier: Apache-2.0
"""The decoder behind the VAE of another library, one module a library, each imported only by who uses it."""
