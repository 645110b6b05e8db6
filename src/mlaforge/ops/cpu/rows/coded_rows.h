// Coded rows of a latent (modeling/coded_rows_mla.py): integers of 1 to 11 bits, by decreasing number of bits, in planes of 8,
// 4, 2 and 1 bits (modeling/coded_layout_mla.py). A rotary key of 8-bit codes with a bf16 scale follows.
//
// Limit: 32 coordinates take three instructions for the first plane, five for each further one, and about twelve for the
// conversion to bf16 (AVX-512: six).
#pragma once
#include <array>
#include <bit>

#include "rows/int8_rows.h"

struct CodedRows {
  static constexpr int64_t ID = 3, TOKENS = 1;
  static constexpr int64_t MAX_BITS = 11, ALIGNMENT = 16;
  static constexpr int64_t BLOCK = 32;  // coordinates that are encoded or decoded at a time

  int64_t width = 0, rank = 0;

  CodedRows() = default;
  // sizes: the rotary key's width, then how many coordinates have at least 1, 2, ... bits; multiples of 8.
  explicit CodedRows(at::IntArrayRef sizes) : rope_(sizes[0]) {
    const std::vector<int64_t> counts = sizes.slice(1).vec();
    const int64_t most = counts.size();
    TORCH_CHECK(most > 0 && most <= MAX_BITS, "a code has 1 to ", MAX_BITS, " bits");
    rank = counts[0], width = rank + rope_;
    for (int64_t bits = most, first = 0; bits > 0; --bits) {
      const int64_t end = counts[bits - 1];
      TORCH_CHECK(end > 0 && end % 8 == 0 && end >= first, "sizes of a code are invalid: ", sizes);
      if (end > first) runs_.push_back({bits, first, end - first});
      first = end;
    }
    int64_t end = 0;
    for (int64_t plane = 0; plane < 4; ++plane) {
      end = round_up(end, ALIGNMENT);
      for (Run& run : runs_) {
        if (!(run.bits & WIDTHS[plane])) continue;
        run.offsets[plane] = end;
        end += segment_bytes(plane, run.count);
      }
    }
    scale_offset_ = end, rope_offset_ = rope_ ? round_up(end + 2, ALIGNMENT) : end;
    bytes_ = round_up(rope_offset_ + rope_, ALIGNMENT);
    for (Run& run : runs_)
      for (int64_t plane = 0; plane < 4; ++plane)
        if (run.bits & WIDTHS[plane])
          run.readable &= run.offsets[plane] + segment_bytes(plane, round_up(run.count, BLOCK)) <= bytes_;
    if (rope_) rotary_ = Int8Rows(std::array<int64_t, 1>{rope_});
  }

  int64_t unit_bytes() const { return bytes_; }

  void write(const bf16* row, uint8_t* to) const {
    std::memset(to, 0, bytes_);
    for (const Run& run : runs_)
      for (int64_t i = 0; i < run.count; i += BLOCK) write_block(run, i, row, to);
    if (!rope_) return;
    static thread_local std::vector<uint8_t> rotary;
    rotary.resize(rotary_.unit_bytes());
    rotary_.write(row + rank, rotary.data());
    std::memcpy(to + rope_offset_, rotary.data(), rope_);
    std::memcpy(to + scale_offset_, rotary.data() + rotary_.scales_offset(), 2);
  }

  void read(Units units, const int32_t* slots, int64_t count, int64_t first, int64_t last, bf16* rows, int64_t stride) const {
    const int64_t end = std::min(last, rank);
    for (const Run& run : runs_)
      if (run.first < end && run.first + run.count > first)
        read_run(run, units, slots, count, first, end, rows, stride, std::make_integer_sequence<int, MAX_BITS>());
    const int64_t from = std::max<int64_t>(first - rank, 0), until = last - rank;
    for (int64_t t = 0; t < count && from < until; ++t) {
      const uint8_t* row = units.at(slots[t]);
      const Floats scale = broadcast((const bf16*)(row + scale_offset_));
      const auto* codes = (const int8_t*)(row + rope_offset_);
      for (int64_t i = from; i < until; i += 16)
        narrow(rows + t * stride + rank + i, widen(codes + i, until - i) * scale, std::min<int64_t>(16, until - i));
    }
  }

  // Prefetches a whole row: every range of elements has bits in most planes.
  void prefetch(Units units, int64_t slot, int64_t, int64_t) const { prefetch_bytes(units.at(slot), unit_bytes()); }

 private:
  static constexpr int64_t WIDTHS[4] = {8, 4, 2, 1};  // bits of a code in each plane

  // Consecutive coordinates with codes of equally many bits.
  struct Run {
    int64_t bits, first, count;
    int64_t offsets[4] = {};  // first byte in each plane
    bool readable = true;  // whether the last block can be read to its end without leaving the row
  };

  static int64_t round_up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }
  // Bytes of `count` coordinates in a plane: whole words of 32 bits.
  static int64_t segment_bytes(int64_t plane, int64_t count) { return round_up(count * WIDTHS[plane], 32) / 8; }

  // The lowest bit of a code that this plane holds.
  static constexpr int shift(int bits, int64_t plane) { return bits & -2 * int(WIDTHS[plane]); }

  // Swaps the middle bytes of every 32-bit word: coordinates 0, 2, 1, 3.
  static __m256i byte_order() {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
  }
  // The shift of each group of four coordinates in its word.
  template <int BITS>
  static __m256i shifts() {
    constexpr int GROUPS = 8 / BITS;
    return _mm256_setr_epi32(0, BITS, 2 % GROUPS * BITS, 3 % GROUPS * BITS, 4 % GROUPS * BITS, 5 % GROUPS * BITS,
                             6 % GROUPS * BITS, 7 % GROUPS * BITS);
  }

  // The bits of 32 coordinates in a plane, a byte each.
  template <int BITS>
  static __m256i load_fields(const uint8_t* from) {
    if constexpr (BITS == 8) return _mm256_loadu_si256((const __m256i*)from);
    // Every lane of 32 bits gets the word with its four coordinates, in their order.
    __m256i words, order;
    if constexpr (BITS == 4) {
      words = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
      order = _mm256_setr_epi8(0, 2, 1, 3, 0, 2, 1, 3, 4, 6, 5, 7, 4, 6, 5, 7, 8, 10, 9, 11, 8, 10, 9, 11, 12, 14, 13, 15,
                               12, 14, 13, 15);
    } else if constexpr (BITS == 2) {
      words = _mm256_broadcastq_epi64(_mm_loadu_si64(from));
      order = _mm256_setr_epi8(0, 2, 1, 3, 0, 2, 1, 3, 0, 2, 1, 3, 0, 2, 1, 3, 4, 6, 5, 7, 4, 6, 5, 7, 4, 6, 5, 7, 4, 6, 5, 7);
    } else {
      words = _mm256_broadcastd_epi32(_mm_loadu_si32(from));
      order = byte_order();
    }
    const __m256i shifted = _mm256_srlv_epi32(_mm256_shuffle_epi8(words, order), shifts<BITS>());
    return _mm256_and_si256(shifted, _mm256_set1_epi8((1 << BITS) - 1));
  }

  // Adds a plane's bits to the codes' lower or upper bytes.
  template <int B, int PLANE>
  static void add_fields(const uint8_t* from, __m256i& lower, __m256i& upper) {
    constexpr int BITS = WIDTHS[PLANE];
    if constexpr (B & BITS) {
      __m256i& bytes = shift(B, PLANE) < 8 ? lower : upper;
      const __m256i fields = load_fields<BITS>(from);
      bytes = _mm256_or_si256(bytes, _mm256_slli_epi16(fields, shift(B, PLANE) % 8));
    }
  }

  // Decodes 32 coordinates of B bits of a row from their bytes in each plane.
  template <int B>
  [[gnu::always_inline]] static void decode(const uint8_t* row, const std::array<int64_t, 4>& offsets, bf16* to) {
    __m256i lower = _mm256_setzero_si256(), upper = lower;
    add_fields<B, 0>(row + offsets[0], lower, upper), add_fields<B, 1>(row + offsets[1], lower, upper);
    add_fields<B, 2>(row + offsets[2], lower, upper), add_fields<B, 3>(row + offsets[3], lower, upper);
#ifndef __AVX512F__
    if constexpr (B <= 4) return look_up<B>(to, lower);
#endif
    if constexpr (B <= 8) store_bytes(to, _mm256_sub_epi8(lower, _mm256_set1_epi8(char(1 << (B - 1)))));
    else store_codes(to, lower, upper, 1 << (B - 1));
  }

  template <int... B>
  void read_run(const Run& run, Units units, const int32_t* slots, int64_t count, int64_t first, int64_t last, bf16* rows,
                int64_t stride, std::integer_sequence<int, B...>) const {
    ((run.bits == B + 1 ? read_run<B + 1>(run, units, slots, count, first, last, rows, stride) : void()), ...);
  }

  template <int B>
  void read_run(const Run& run, Units units, const int32_t* slots, int64_t count, int64_t first, int64_t last, bf16* rows,
                int64_t stride) const {
    const int64_t begin = std::max<int64_t>(0, first - run.first) / BLOCK * BLOCK;
    const int64_t end = std::min(run.count, last - run.first);
    for (int64_t i = begin; i < end; i += BLOCK) {
      // Block by block, so that offsets and masks stay in registers for all rows.
      std::array<int64_t, 4> offsets;
      for (int64_t plane = 0; plane < 4; ++plane) offsets[plane] = run.offsets[plane] + i * WIDTHS[plane] / 8;
      bf16* to = rows + run.first + i;
      // A last block that is not full spills into columns that are decoded later, if there are any.
      const bool readable = i + BLOCK <= run.count || run.readable, whole = run.first + i + BLOCK <= last;
      for (int64_t t = 0; readable && whole && t < count; ++t)
        decode<B>(units.at(slots[t]), offsets, to + t * stride);
      for (int64_t t = 0; !(readable && whole) && t < count; ++t)
        read_part<B>(units.at(slots[t]), offsets, std::min(BLOCK, run.count - i), readable, to + t * stride);
    }
  }

  // Decodes `count` coordinates of a last block.
  template <int B>
  static void read_part(const uint8_t* row, std::array<int64_t, 4> offsets, int64_t count, bool readable, bf16* to) {
    alignas(64) uint16_t decoded[BLOCK];
    uint8_t copies[4 * BLOCK] = {};
    for (int64_t plane = 0; plane < 4 && !readable; ++plane) {
      if (B & WIDTHS[plane]) std::memcpy(copies + plane * BLOCK, row + offsets[plane], segment_bytes(plane, count));
      offsets[plane] = plane * BLOCK;
    }
    decode<B>(readable ? row : copies, offsets, (bf16*)decoded);
    std::memcpy((void*)to, decoded, 2 * count);
  }

  // The even and odd ones of 16 signed 16-bit integers.
  static __m256 even_floats(__m256i x) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 16), 16)); }
  static __m256 odd_floats(__m256i x) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(x, 16)); }

#ifdef __AVX512F__
  // Converts 32 signed bytes.
  [[gnu::always_inline]] static void store_bytes(bf16* to, __m256i x) {
    auto half = [](__m128i bytes) { return Floats{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))}; };
    narrow(to, half(_mm256_castsi256_si128(x)), half(_mm256_extracti128_si256(x, 1)));
  }

  static Floats join(__m256 low, __m256 high) { return {_mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1)}; }
#else
  // Converts 32 signed bytes. bf16 represents them exactly, so the upper halves of floats are the result.
  [[gnu::always_inline]] static void store_bytes(bf16* to, __m256i x) {
    auto put = [](bf16* to, __m128i bytes) {
      const __m256i words = _mm256_cvtepi8_epi16(bytes);
      const __m256i even = _mm256_srli_epi32(_mm256_castps_si256(even_floats(words)), 16);
      _mm256_storeu_si256((__m256i*)to, _mm256_blend_epi16(even, _mm256_castps_si256(odd_floats(words)), 0xaa));
    };
    put(to, _mm256_castsi256_si128(x)), put(to + 16, _mm256_extracti128_si256(x, 1));
  }

  // Converts 32 codes of at most 4 bits, less their offset: each byte of a bf16 is one of 16.
  template <int B>
  [[gnu::always_inline]] static void look_up(bf16* to, __m256i codes) {
    constexpr auto table = [](int shift) {
      std::array<char, 16> bytes{};
      for (int code = 0; code < 1 << B; ++code)
        bytes[code] = char(std::bit_cast<uint32_t>(float(code - (1 << (B - 1)))) >> shift);
      return bytes;
    };
    static constexpr std::array<char, 16> low = table(16), high = table(24);
    auto bytes = [&](const std::array<char, 16>& of) {
      return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)of.data())), codes);
    };
    const __m256i first = _mm256_unpacklo_epi8(bytes(low), bytes(high)), second = _mm256_unpackhi_epi8(bytes(low), bytes(high));
    _mm256_storeu_si256((__m256i*)to, _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256((__m256i*)(to + 16), _mm256_permute2x128_si256(first, second, 0x31));
  }

  static Floats join(__m256 low, __m256 high) { return {low, high}; }
#endif

  // Converts 32 codes of up to 16 bits, less `offset`.
  static void store_codes(bf16* to, __m256i lower, __m256i upper, int offset) {
    auto words = [&](__m128i lower, __m128i upper) {
      const __m256i code = _mm256_or_si256(_mm256_cvtepu8_epi16(lower), _mm256_slli_epi16(_mm256_cvtepu8_epi16(upper), 8));
      return _mm256_sub_epi16(code, _mm256_set1_epi16(int16_t(offset)));
    };
    const __m256i first = words(_mm256_castsi256_si128(lower), _mm256_castsi256_si128(upper));
    const __m256i second = words(_mm256_extracti128_si256(lower, 1), _mm256_extracti128_si256(upper, 1));
    store(to, narrow_interleaved(join(even_floats(first), even_floats(second)), join(odd_floats(first), odd_floats(second))));
  }

  // Writes up to 32 coordinates of a run, from its i-th on.
  void write_block(const Run& run, int64_t i, const bf16* row, uint8_t* to) const {
    const int64_t count = std::min(BLOCK, run.count - i);
    const float offset = float(1 << (run.bits - 1));
    alignas(32) int16_t codes[BLOCK];
    for (int64_t j = 0; j < BLOCK; j += 16) {
      const Floats x = widen(row + run.first + i + j, std::clamp<int64_t>(count - j, 0, 16));
      // NaN becomes 0, because no code represents it.
      const Floats valid = select(greater(abs(x), splat(-1.0f)), x, splat(0.0f));
      const Floats least = max(valid, splat(-offset)), negated = max(splat(0.0f) - least, splat(1.0f - offset));
      store(codes + j, round_nearest(splat(0.0f) - negated) + splat(offset));
    }
    std::fill(codes + count, codes + BLOCK, int16_t(0));
    for (int64_t plane = 0; plane < 4; ++plane) {
      if (!(run.bits & WIDTHS[plane])) continue;
      uint8_t* at = to + run.offsets[plane] + i * WIDTHS[plane] / 8;
      const int lowest = shift(int(run.bits), plane);
      if (plane == 0) store_fields<8>(at, codes, lowest, count);
      else if (plane == 1) store_fields<4>(at, codes, lowest, count);
      else if (plane == 2) store_fields<2>(at, codes, lowest, count);
      else store_fields<1>(at, codes, lowest, count);
    }
  }

  // Inverse of load_fields for bits [lowest, lowest + BITS) of 32 codes; writes those of `count`.
  template <int BITS>
  static void store_fields(uint8_t* to, const int16_t* codes, int lowest, int64_t count) {
    auto field = [&](int64_t j) {
      const __m256i code = _mm256_srl_epi16(_mm256_load_si256((const __m256i*)(codes + j)), _mm_cvtsi32_si128(lowest));
      return _mm256_and_si256(code, _mm256_set1_epi16((1 << BITS) - 1));
    };
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(field(0), field(16)), 0xd8);
    alignas(32) uint32_t groups[8], words[8] = {};
    if constexpr (BITS == 8) {
      _mm256_store_si256((__m256i*)words, bytes);
    } else {
      const __m256i shifted = _mm256_sllv_epi32(_mm256_shuffle_epi8(bytes, byte_order()), shifts<BITS>());
      _mm256_store_si256((__m256i*)groups, shifted);
      for (int j = 0; j < 8; ++j) words[j * BITS / 8] |= groups[j];
    }
    std::memcpy(to, words, (count * BITS + 31) / 32 * 4);
  }

  std::vector<Run> runs_;
  int64_t rope_ = 0, scale_offset_ = 0, rope_offset_ = 0, bytes_ = 0;
  Int8Rows rotary_;
};
