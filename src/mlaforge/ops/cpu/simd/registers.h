// One full register of bytes or 16-bit integers, on AVX-512 or AVX2.
#pragma once
#include <immintrin.h>

#include <cstdint>

#ifdef __AVX512F__
using Register = __m512i;

inline Register load_register(const void* from) { return _mm512_loadu_si512(from); }
inline void store_register(void* to, Register x) { _mm512_storeu_si512(to, x); }
inline Register broadcast(uint32_t bits) { return _mm512_set1_epi32(int(bits)); }
inline Register broadcast_lanes(__m128i x) { return _mm512_broadcast_i32x4(x); }
inline Register and_(Register a, Register b) { return _mm512_and_si512(a, b); }
inline Register or_(Register a, Register b) { return _mm512_or_si512(a, b); }
inline Register add_bytes(Register a, Register b) { return _mm512_add_epi8(a, b); }
// Shuffles the bytes of each 16-byte lane by `order`; indices above 127 give 0.
inline Register shuffle_bytes(Register bytes, Register order) { return _mm512_shuffle_epi8(bytes, order); }
// 16-bit lanes.
template <int BITS> Register slli(Register x) { return _mm512_slli_epi16(x, BITS); }
template <int BITS> Register srli(Register x) { return _mm512_srli_epi16(x, BITS); }
inline Register upper_product(Register a, Register b) { return _mm512_mulhi_epu16(a, b); }
inline Register lower_product(Register a, Register b) { return _mm512_mullo_epi16(a, b); }
// Zero-extends 16-bit lanes to 32 bits.
inline Register widen(const uint16_t* from) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)); }
#else
using Register = __m256i;

inline Register load_register(const void* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline void store_register(void* to, Register x) { _mm256_storeu_si256((__m256i*)to, x); }
inline Register broadcast(uint32_t bits) { return _mm256_set1_epi32(int(bits)); }
inline Register broadcast_lanes(__m128i x) { return _mm256_broadcastsi128_si256(x); }
inline Register and_(Register a, Register b) { return _mm256_and_si256(a, b); }
inline Register or_(Register a, Register b) { return _mm256_or_si256(a, b); }
inline Register add_bytes(Register a, Register b) { return _mm256_add_epi8(a, b); }
inline Register shuffle_bytes(Register bytes, Register order) { return _mm256_shuffle_epi8(bytes, order); }
template <int BITS> Register slli(Register x) { return _mm256_slli_epi16(x, BITS); }
template <int BITS> Register srli(Register x) { return _mm256_srli_epi16(x, BITS); }
inline Register upper_product(Register a, Register b) { return _mm256_mulhi_epu16(a, b); }
inline Register lower_product(Register a, Register b) { return _mm256_mullo_epi16(a, b); }
inline Register widen(const uint16_t* from) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)); }
#endif
