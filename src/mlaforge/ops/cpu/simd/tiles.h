// AMX: products of tiles of 16 rows and 64 bytes. A result's row depends only on its own row of A.
#pragma once
#include "simd/vectors.h"

// Configuration of the eight tiles: 16 rows of 64 bytes unless changed.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  TileConfig() { for (int i = 0; i < 8; ++i) bytes[i] = 64, rows[i] = 16; }
};

// GCC's intrinsics do not declare that they read memory, so earlier stores must not be delayed.
inline void compiler_barrier() { asm volatile("" ::: "memory"); }

// Tile configuration of two row groups, whose sizes are `first` and `second`: results in tiles 0 and 1, and 2 and 3; A in 4
// and 5; B in 6 and 7.
inline void configure_tiles(int64_t first, int64_t second) {
  TileConfig shape;
  for (int i : {0, 1, 4}) shape.rows[i] = uint8_t(first);
  for (int i : {2, 3, 5}) shape.rows[i] = uint8_t(second ? second : 16);
  compiler_barrier();
  _tile_loadconfig(&shape);
}

// Transposes 16 x 16 elements of 32 bits.
inline void transpose16(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]), r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]), r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88), t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88), r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

// Tile configuration of attention: A in tiles 4 and 5, B in 6 and 7, over `bytes` of a row.
inline void configure_attention_tiles(int64_t bytes) {
  TileConfig shape;
  for (int i : {4, 5}) shape.bytes[i] = uint16_t(bytes);
  for (int i : {6, 7}) shape.rows[i] = uint8_t(bytes / 4);
  compiler_barrier();
  _tile_loadconfig(&shape);
}

inline void release_tiles() { _tile_release(); }
