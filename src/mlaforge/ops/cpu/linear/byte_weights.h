// 8-bit weights as the kernels multiply them (linear_int8.h); other formats unpack to these (linear_int4.h).
#pragma once
#include "simd/scratch.h"
#include "simd/vectors.h"

constexpr int64_t STEP = 64;  // inputs per tile
constexpr int64_t TILE_BYTES = 1024;  // of weights or of x
// Bytes of weights to prefetch before they are read, from benchmarks/kernels.json where they were swept.
#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
constexpr int64_t BYTES_AHEAD = 8 * TILE_BYTES;
#else
constexpr int64_t BYTES_AHEAD = 2 * TILE_BYTES;
#endif

// Step s of a block: 64 inputs of 16 outputs, 1024 bytes. ahead: bytes to prefetch before they are read.
struct Int8Weights {
  const uint8_t* packed;
  int64_t ahead = BYTES_AHEAD;

  Int8Weights from(int64_t step) const { return {packed + step * TILE_BYTES, ahead}; }
  const uint8_t* step(int64_t s, uint8_t*) const { return packed + s * TILE_BYTES; }
  // The hardware prefetcher stops at page boundaries.
  void prefetch(int64_t s) const {
    for (int64_t line = 0; line < TILE_BYTES; line += 64)
      _mm_prefetch((const char*)packed + s * TILE_BYTES + ahead + line, _MM_HINT_T0);
  }
  // Returns `steps` steps in one place, for rows that read them again.
  Int8Weights unpacked(int64_t, uint8_t*) const { return *this; }
};
