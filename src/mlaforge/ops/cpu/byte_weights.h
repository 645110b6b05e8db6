// Weights of 8 bits as they are multiplied (linear_int8.h), and those that are unpacked to them (linear_int4.h).
#pragma once
#include "vectors.h"

constexpr int64_t STEP = 64;          // inputs of a tile
constexpr int64_t TILE_BYTES = 1024;  // of weights or of x

// Step s of a block is 64 inputs of 16 outputs, 1024 bytes.
struct Bytes {
  const uint8_t* packed;

  Bytes from(int64_t step) const { return {packed + step * TILE_BYTES}; }
  const uint8_t* step(int64_t s, uint8_t*) const { return packed + s * TILE_BYTES; }
  // The processor's own prefetcher stops at the end of a page.
  void prefetch(int64_t s) const {
    for (int64_t line = 0; line < TILE_BYTES; line += 64)
      _mm_prefetch((const char*)packed + (s + 2) * TILE_BYTES + line, _MM_HINT_T0);
  }
  // `steps` of them in one place, for rows that read them again.
  Bytes unpacked(int64_t, uint8_t*) const { return *this; }
};

// Room that begins with a line of the cache.
struct Room {
  uint8_t* data;
  explicit Room(int64_t bytes) : data((uint8_t*)std::aligned_alloc(64, bytes)) {}
  ~Room() { std::free(data); }
  Room(const Room&) = delete;
};
