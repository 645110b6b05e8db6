// AMX's tiles in memory, for processors without them: included before ops/cpu/native.cpp, which is compiled for AVX-512, it
// stands for the compiler's intrinsics. The arithmetic, and so every bit of a result, is that of Intel's Software Developer's
// Manual, volume 2 (LDTILECFG, TILELOADD, TDPBF16PS, TDPBSSD and its kin); what ends a process there, shapes that do not fit
// together or tiles that were not configured, is an exception here. Of a tile's unused rows and bytes all are zero.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace emulated_amx {

struct Tile {
  alignas(64) uint8_t row[16][64] = {};
  int rows = 0, bytes = 0;
};
inline thread_local Tile tiles[8];

inline void check(bool good, const char* what) {
  if (!good) throw std::logic_error(what);
}

inline void load_configuration(const void* from) {
  const auto* config = (const uint8_t*)from;
  check(config[0] == 1 && config[1] == 0, "LDTILECFG: the palette is not 1, or a row is to start with");
  for (int i = 0; i < 8; ++i) {
    uint16_t bytes;
    std::memcpy(&bytes, config + 16 + 2 * i, 2);
    const int rows = config[48 + i];
    check(rows <= 16 && bytes <= 64 && (rows == 0) == (bytes == 0), "LDTILECFG: no such tile");
    tiles[i] = {};
    tiles[i].rows = rows, tiles[i].bytes = bytes;
  }
}

inline void release() {
  for (Tile& tile : tiles) tile = {};
}

inline Tile& configured(int i) {
  check(tiles[i].rows > 0, "a tile is used that was not configured");
  return tiles[i];
}

inline __mmask64 used(const Tile& tile) { return ~__mmask64(0) >> (64 - tile.bytes); }

inline void zero(int i) { std::memset(configured(i).row, 0, sizeof(Tile::row)); }

inline void load(int i, const void* from, int64_t stride) {
  Tile& tile = configured(i);
  for (int m = 0; m < tile.rows; ++m)
    _mm512_store_si512(tile.row[m], _mm512_maskz_loadu_epi8(used(tile), (const uint8_t*)from + m * stride));
}

inline void store(int i, void* to, int64_t stride) {
  const Tile& tile = configured(i);
  for (int m = 0; m < tile.rows; ++m)
    _mm512_mask_storeu_epi8((uint8_t*)to + m * stride, used(tile), _mm512_load_si512(tile.row[m]));
}

// a, of m rows of k fours of bytes, times b, of k rows of n, into c, of m rows of n.
struct Product {
  Tile &c, &a, &b;

  Product(int c, int a, int b) : c(configured(c)), a(configured(a)), b(configured(b)) {
    check(this->c.rows == this->a.rows && this->c.bytes == this->b.bytes && this->a.bytes == 4 * this->b.rows,
          "shapes of tiles do not fit together");
    check(this->c.bytes % 4 == 0 && c != a && c != b && a != b, "a tile is of no whole numbers, or twice in a product");
  }
  // Four bytes of a's row m, in every lane.
  __m512i four(int m, int k) const {
    int32_t some;
    std::memcpy(&some, a.row[m] + 4 * k, 4);
    return _mm512_set1_epi32(some);
  }
};

// The sums of a pair's first numbers and of its second ones are apart, and are added to what is there at the end. A function
// of its own, so that the compiler moves no sum to before or behind the setting of how its denormals are treated.
[[gnu::noinline]] inline void add_pairs(const Product& product) {
  const __m512i upper = _mm512_set1_epi32(int32_t(0xffff0000));
  auto first = [](__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); };
  auto second = [&](__m512i pairs) { return _mm512_castsi512_ps(_mm512_and_si512(pairs, upper)); };
  for (int m = 0; m < product.c.rows; ++m) {
    __m512 firsts = _mm512_setzero_ps(), seconds = _mm512_setzero_ps();
    for (int k = 0; k < product.b.rows; ++k) {
      const __m512i x = product.four(m, k), y = _mm512_load_si512(product.b.row[k]);
      firsts = _mm512_fmadd_ps(first(x), first(y), firsts);
      seconds = _mm512_fmadd_ps(second(x), second(y), seconds);
    }
    const __m512 sum = _mm512_add_ps(_mm512_load_ps(product.c.row[m]), _mm512_add_ps(firsts, seconds));
    _mm512_store_si512(product.c.row[m], _mm512_maskz_mov_epi8(used(product.c), _mm512_castps_si512(sum)));
  }
}

inline void dpbf16ps(int c, int a, int b) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x1f80 | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);  // to the nearest, no exceptions
  add_pairs({c, a, b});
  _mm_setcsr(before);
}

// VPDPBUSD multiplies bytes without a sign by bytes with one, without saturation.
template <typename Sum>
void add_fours(const Product& product, Sum sum) {
  for (int m = 0; m < product.c.rows; ++m) {
    __m512i to = _mm512_load_si512(product.c.row[m]);
    for (int k = 0; k < product.b.rows; ++k) to = sum(to, product.four(m, k), _mm512_load_si512(product.b.row[k]));
    _mm512_store_si512(product.c.row[m], _mm512_maskz_mov_epi8(used(product.c), to));
  }
}

inline void dpbusd(int c, int a, int b) {
  add_fours({c, a, b}, [](__m512i to, __m512i x, __m512i y) { return _mm512_dpbusd_epi32(to, x, y); });
}

inline void dpbsud(int c, int a, int b) {
  add_fours({c, a, b}, [](__m512i to, __m512i x, __m512i y) { return _mm512_dpbusd_epi32(to, y, x); });
}

inline void dpbssd(int c, int a, int b) {
  // x + 128 has no sign; 128 times y is taken away again.
  const __m512i more = _mm512_set1_epi8(-128);
  add_fours({c, a, b}, [&](__m512i to, __m512i x, __m512i y) {
    const __m512i added = _mm512_dpbusd_epi32(_mm512_setzero_si512(), more, y);
    return _mm512_sub_epi32(_mm512_dpbusd_epi32(to, _mm512_xor_si512(x, more), y), added);
  });
}

}  // namespace emulated_amx

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#define _tile_loadconfig emulated_amx::load_configuration
#define _tile_release emulated_amx::release
#define _tile_zero emulated_amx::zero
#define _tile_loadd emulated_amx::load
#define _tile_stored emulated_amx::store
#define _tile_dpbf16ps emulated_amx::dpbf16ps
#define _tile_dpbssd emulated_amx::dpbssd
#define _tile_dpbsud emulated_amx::dpbsud
#define _tile_dpbusd emulated_amx::dpbusd
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
