// Coded rows of a latent (modeling/coded_rows_mla.py): integers of 1 to 11 bits, by decreasing number of bits, stored as bit
// planes, lowest bit first. A rotary key of 8-bit codes with a bf16 scale follows.
//
// Limit: reading counts[0] + counts[1] + ... bits per token. 64 coordinates take one instruction per plane, and about 14 for
// the conversion to bf16.
#pragma once
#include <array>

#include "rows/int8_rows.h"

struct CodedRows {
  static constexpr int64_t ID = 3, TOKENS = 1;
  static constexpr int64_t MAX_BITS = 11, BLOCK = 64;

  int64_t width = 0, rank = 0;

  CodedRows() = default;
  // sizes: the rotary key's width, then how many coordinates have at least 1, 2, ... bits; multiples of 8.
  explicit CodedRows(at::IntArrayRef sizes) : counts_(sizes.slice(1).vec()) {
    const int64_t rope = sizes[0];
    TORCH_CHECK(!counts_.empty() && counts_.size() <= MAX_BITS, "a code has 1 to ", MAX_BITS, " planes");
    rank = counts_[0], width = rank + rope;
    for (size_t b = 0; b < counts_.size(); ++b) {
      TORCH_CHECK(counts_[b] % 8 == 0 && counts_[b] > 0 && counts_[b] <= counts_[b ? b - 1 : 0], "sizes of the planes are invalid: ", sizes);
      plane_offsets_.push_back(planes_), planes_ += counts_[b] / 8;
    }
    offsets_.assign((rank + BLOCK - 1) / BLOCK * BLOCK, 0);
    for (int64_t i = 0; i < rank; ++i) offsets_[i] = 1 << (bits(i) - 1);
    if (rope) rotary_ = Int8Rows(std::array<int64_t, 1>{rope}), rotary_offset_ = planes_ + (planes_ + rope) % 2;
  }

  int64_t unit_bytes() const { return rotary_.width ? rotary_offset_ + rotary_.width + 2 : planes_; }

  void write(const bf16* row, uint8_t* to) const {
    for (int64_t at = 0; at < rank; at += BLOCK) write_block(row, at, to);
    if (!rotary_.width) return;
    if (rotary_offset_ > planes_) to[planes_] = 0;
    rotary_.write(row + rank, to + rotary_offset_);
  }

  // Decodes elements [first, last) of the rows at `slots` to their columns of rows [count, width].
  void read(const uint8_t* packed, const int32_t* slots, int64_t count, int64_t first, int64_t last, bf16* rows) const {
    const int64_t stride = unit_bytes(), end = std::min(last, rank);
    for (int64_t t = 0; t < count; ++t) {
      const uint8_t* from = packed + slots[t] * stride;
      for (int64_t at = first / BLOCK * BLOCK; at < end; at += BLOCK) read_block(from, at, rows + t * width);
      const int32_t slot_zero = 0;
      if (last > rank)
        rotary_.read(from + rotary_offset_, &slot_zero, 1, std::max<int64_t>(first - rank, 0), last - rank,
                     rows + t * width + rank);
    }
  }

  // Prefetches a whole row: every range of elements has bits in most planes.
  void prefetch(const uint8_t* packed, int64_t slot, int64_t, int64_t) const {
    prefetch_bytes(packed + slot * unit_bytes(), unit_bytes());
  }

 private:
  int64_t bits(int64_t i) const {
    int64_t bits = 0;
    for (int64_t count : counts_) bits += i < count;
    return bits;
  }

#ifdef __AVX512F__
  void write_block(const bf16* row, int64_t at, uint8_t* to) const {
    alignas(64) uint8_t lows[BLOCK], highs[BLOCK];
    for (int64_t i = 0; i < BLOCK; i += 16) {
      const __m512i offset = _mm512_loadu_si512(offsets_.data() + at + i);
      const __m512 upper = _mm512_cvtepi32_ps(offset), lower = _mm512_sub_ps(_mm512_setzero_ps(), upper);
      const __m512 x = widen(row + at + i, std::clamp<int64_t>(rank - at - i, 0, 16)).reg;
      const __m512 clamped = _mm512_min_ps(_mm512_max_ps(x, lower), _mm512_sub_ps(upper, _mm512_set1_ps(1.0f)));
      const __m512 valid = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), clamped);
      const __m512i code = _mm512_add_epi32(_mm512_cvtps_epi32(valid), offset);
      _mm_store_si128((__m128i*)(lows + i), _mm512_cvtepi32_epi8(code));
      _mm_store_si128((__m128i*)(highs + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(code, 8)));
    }
    for (size_t b = 0; b < counts_.size() && counts_[b] > at; ++b) {
      const __m512i codes = _mm512_load_si512(b < 8 ? lows : highs);
      const uint64_t plane = _cvtmask64_u64(_mm512_test_epi8_mask(codes, _mm512_set1_epi8(char(1 << b % 8))));
      std::memcpy(to + plane_offsets_[b] + at / 8, &plane, std::min<int64_t>(8, (counts_[b] - at) / 8));
    }
  }

  // The 64 bits of plane b from coordinate `at` on.
  __mmask64 plane(const uint8_t* from, size_t b, int64_t at) const {
    const int64_t bytes = std::min<int64_t>(8, (counts_[b] - at) / 8);
    const uint8_t* address = from + plane_offsets_[b] + at / 8;
    return _cvtu64_mask64(uint64_t(_mm_cvtsi128_si64(_mm_maskz_loadu_epi8(__mmask16((1 << bytes) - 1), address))));
  }

  void read_block(const uint8_t* from, int64_t at, bf16* row) const {
    __m512i low = _mm512_setzero_si512(), high = low;
    size_t b = 0;
    for (; b < std::min<size_t>(8, counts_.size()) && counts_[b] > at; ++b)
      low = _mm512_mask_add_epi8(low, plane(from, b, at), low, _mm512_set1_epi8(char(1 << b)));
    const bool wide = b == 8 && counts_.size() > 8 && counts_[8] > at;
    for (; wide && b < counts_.size() && counts_[b] > at; ++b)
      high = _mm512_mask_add_epi8(high, plane(from, b, at), high, _mm512_set1_epi8(char(1 << (b - 8))));
    alignas(64) uint8_t lows[BLOCK], highs[BLOCK];
    _mm512_store_si512(lows, low);
    if (wide) _mm512_store_si512(highs, high);
    auto load_codes = [&](int64_t i) {
      __m512i code = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)(lows + i)));
      if (wide) code = _mm512_or_si512(code, _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)(highs + i))), 8));
      return Floats{_mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_loadu_si512(offsets_.data() + at + i)))};
    };
    for (int64_t i = 0; i < BLOCK && at + i < rank; i += 32) {
      if (at + i + 32 <= rank) {
        narrow(row + at + i, load_codes(i), load_codes(i + 16));
      } else {
        narrow(row + at + i, load_codes(i), std::min<int64_t>(16, rank - at - i));
        if (rank > at + i + 16) narrow(row + at + i + 16, load_codes(i + 16), rank - at - i - 16);
      }
    }
  }
#else
  // A coordinate's code. NaN becomes 0, because no code represents it.
  static int32_t code(float x, int32_t offset) {
    return std::isnan(x) ? offset : int32_t(std::nearbyint(std::min(std::max(x, -float(offset)), float(offset) - 1))) + offset;
  }

  void write_block(const bf16* row, int64_t at, uint8_t* to) const {
    int32_t codes[BLOCK] = {};
    for (int64_t i = 0; i < std::min(BLOCK, rank - at); ++i) codes[i] = code(float(row[at + i]), offsets_[at + i]);
    for (size_t b = 0; b < counts_.size(); ++b)
      for (int64_t i = 0; i < std::min(BLOCK, counts_[b] - at); i += 8) {
        uint8_t byte = 0;
        for (int64_t j = 0; j < 8; ++j) byte |= uint8_t((codes[i + j] >> b & 1) << j);
        to[plane_offsets_[b] + (at + i) / 8] = byte;
      }
  }

  // Expands the bits of a byte to bytes of 0 or 1.
  static uint64_t spread(uint8_t byte) {
    // Replicates the byte, isolates a different bit in each copy, and moves it to bit 0.
    const uint64_t isolated = (byte * 0x0101010101010101u) & 0x8040201008040201u;
    return ((isolated + 0x7f7f7f7f7f7f7f7fu) | isolated) >> 7 & 0x0101010101010101u;
  }

  void read_block(const uint8_t* from, int64_t at, bf16* row) const {
    for (int64_t i = at; i < std::min(at + BLOCK, rank); i += 8) {
      uint64_t low = 0, high = 0;
      for (size_t b = 0; b < counts_.size() && counts_[b] > i; ++b)
        (b < 8 ? low : high) |= spread(from[plane_offsets_[b] + i / 8]) << b % 8;
      float buffer[16];
      for (int64_t j = 0; j < 8; ++j)
        buffer[j] = float(int32_t((low >> 8 * j & 255) | (high >> 8 * j & 255) << 8) - offsets_[i + j]);
      narrow(row + i, load(buffer, 8), 8);
    }
  }
#endif

  std::vector<int64_t> counts_, plane_offsets_;  // of each plane: its coordinates, and its first byte
  std::vector<int32_t> offsets_;  // of each coordinate: 2^(bits - 1)
  int64_t planes_ = 0, rotary_offset_ = 0;
  Int8Rows rotary_;
};
