// How the rows of a format are read and written, for kernels that know no format by name.
//
// A format is a header rows/<name>_rows.h with a struct <Name>Rows. It is registered by its name: ops/kernel_library.py
// writes row_formats.h, the list of all formats. The struct has
//
//   ID, TOKENS                                 the first number of its descriptor; tokens per unit, which are packed together
//   explicit <Name>Rows(at::IntArrayRef)       from the descriptor's other numbers
//   width, unit_bytes()                        elements of a row; bytes of a unit
//   write(rows, unit)                          packs TOKENS contiguous rows of bf16 into a unit
//   read(units, slots, count, first, last, rows, stride)    decodes elements [first, last) of the rows at `slots` to their
//                                              columns of `count` rows, `stride` elements apart
//   prefetch(units, slot, first, last)         prefetches elements [first, last) of a row
//   codes()                                    optional: kernels may multiply the codes of the rows in place (row_codes.h)
#pragma once
#include <memory>

#include "rows/row_codes.h"

// The interface of all formats. A call is for a batch of rows.
class RowFormat {
 public:
  const int64_t width, unit_bytes, tokens;
  const std::optional<RowCodes> codes;

  virtual ~RowFormat() = default;
  virtual void write(const bf16* rows, uint8_t* unit) const = 0;
  virtual void read(Units units, const int32_t* slots, int64_t count, int64_t first, int64_t last, bf16* rows,
                    int64_t stride) const = 0;
  virtual void prefetch(Units units, const int32_t* slots, int64_t count, int64_t first, int64_t last) const = 0;

 protected:
  RowFormat(int64_t width, int64_t unit_bytes, int64_t tokens, std::optional<RowCodes> codes)
      : width(width), unit_bytes(unit_bytes), tokens(tokens), codes(std::move(codes)) {}
};

template <typename Format>
class FormatRows final : public RowFormat {
 public:
  explicit FormatRows(const Format& format)
      : RowFormat(format.width, format.unit_bytes(), Format::TOKENS, codes_of(format)), format_(format) {}

  void write(const bf16* rows, uint8_t* unit) const override { format_.write(rows, unit); }

  void read(Units units, const int32_t* slots, int64_t count, int64_t first, int64_t last, bf16* rows,
            int64_t stride) const override {
    format_.read(units, slots, count, first, last, rows, stride);
  }

  void prefetch(Units units, const int32_t* slots, int64_t count, int64_t first, int64_t last) const override {
    for (int64_t t = 0; t < count; ++t) format_.prefetch(units, slots[t], first, last);
  }

 private:
  static std::optional<RowCodes> codes_of(const Format& format) {
    if constexpr (requires { format.codes(); }) return format.codes();
    else return std::nullopt;
  }

  const Format format_;
};

template <typename... Formats>
struct FormatList {
  // First numbers of the descriptors.
  static std::vector<int64_t> ids() { return {Formats::ID...}; }

  // Returns the format of a descriptor (ops/row_formats/format.py).
  static std::shared_ptr<const RowFormat> find(at::IntArrayRef descriptor) {
    std::shared_ptr<const RowFormat> format;
    const bool exists = ((Formats::ID == descriptor[0] && (format = create<Formats>(descriptor.slice(1)))) || ...);
    TORCH_CHECK(exists, "rows in format ", descriptor, " are not supported");
    return format;
  }

 private:
  template <typename Format>
  static std::shared_ptr<const RowFormat> create(at::IntArrayRef sizes) {
    return std::make_shared<FormatRows<Format>>(Format(sizes));
  }
};
