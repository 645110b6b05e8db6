// AMX: products of bf16 tiles, 16 rows times 32 numbers. A row of a result depends on its own row alone, and on nothing
// else that is computed with it.
#pragma once
#include "vectors.h"

// Sizes of the eight tiles: rows of four of them, the others have sixteen; every row has 64 bytes.
struct alignas(64) Shape {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  Shape() { for (int i = 0; i < 8; ++i) bytes[i] = 64, rows[i] = 16; }
};

// GCC's intrinsics do not say that they read memory: what was written before must not be kept back.
inline void memory_is_read() { asm volatile("" ::: "memory"); }

// The first `rows` rows of A and of the results that it makes, for two row groups: tiles 0 and 1 of the first, 2 and 3 of
// the second, A in 4 and 5, B in 6 and 7.
inline void shape_tiles(int64_t first, int64_t second) {
  Shape shape;
  for (int i : {0, 1, 4}) shape.rows[i] = uint8_t(first);
  for (int i : {2, 3, 5}) shape.rows[i] = uint8_t(second ? second : 16);
  memory_is_read();
  _tile_loadconfig(&shape);
}

inline void release_tiles() { _tile_release(); }
