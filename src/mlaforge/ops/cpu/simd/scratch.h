// Scratch memory of a thread, reused across calls, because the OS would commit fresh memory page by page.
//
// A `Scratch` is a scope: what it returns is valid until it ends. Scopes of a thread end in the reverse order of their
// begin, and only the innermost one allocates, so an object that reads scratch has a Scratch as a member and allocates in
// its constructor, or while no later scope is open. Memory of a scope may be read and written by other threads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

class Scratch {
 public:
  Scratch() : arena_(Arena::of_thread()), block_(arena_.block), used_(arena_.used), depth_(++arena_.depth) {}
  ~Scratch() {
    arena_.block = block_, arena_.used = used_;
    if (--arena_.depth == 0) arena_.merge();
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Uninitialized memory for `count` elements, aligned to 64 bytes. A vector that begins in it may be loaded or stored whole.
  template <typename T>
  T* get(int64_t count) {
    TORCH_INTERNAL_ASSERT(depth_ == arena_.depth, "scratch is taken from a scope that is not the innermost");
    const int64_t bytes = (count * int64_t(sizeof(T)) + 63) / 64 * 64 + 64;
    uint8_t* memory = arena_.allocate(bytes);
#ifdef POISONED_SCRATCH
    std::memset(memory, 255, bytes);  // NaN in every float format: tests detect reads of uninitialized memory
#endif
    return (T*)memory;
  }

  template <typename T>
  T* filled(int64_t count, T value) {
    T* memory = get<T>(count);
    std::fill_n(memory, count, value);
    return memory;
  }

 private:
  // Memory that a thread retains between calls; more, for a long prompt, is released when the last scope ends.
  static constexpr int64_t RETAINED = int64_t(64) << 20, SMALLEST = int64_t(1) << 20;

  struct Arena {
    struct Block { uint8_t* memory; int64_t bytes; };
    std::vector<Block> blocks;
    size_t block = 0;  // the current block
    int64_t used = 0;  // bytes of it
    int64_t depth = 0;  // open scopes
    int64_t first_bytes = SMALLEST;  // of the next first block

    ~Arena() { release(); }

    static Arena& of_thread() {
      static thread_local Arena arena;
      return arena;
    }

    uint8_t* allocate(int64_t bytes) {
      while (block < blocks.size() && used + bytes > blocks[block].bytes) ++block, used = 0;
      if (block == blocks.size()) {
        const int64_t size = std::max(bytes, blocks.empty() ? first_bytes : 2 * blocks.back().bytes) / 64 * 64;
        auto* memory = (uint8_t*)std::aligned_alloc(64, size);
        if (!memory) throw std::bad_alloc();
        blocks.push_back({memory, size});
      }
      return blocks[block].memory + std::exchange(used, used + bytes);
    }

    // Replaces several blocks by one that has room for all, at the next call.
    void merge() {
      int64_t bytes = 0;
      for (const Block& old : blocks) bytes += old.bytes;
      if (blocks.size() < 2 && bytes <= RETAINED) return;
      release();
      first_bytes = std::min(bytes, RETAINED);
    }

    void release() {
      for (const Block& old : blocks) std::free(old.memory);
      blocks.clear(), block = 0, used = 0;
    }
  };

  Arena& arena_;
  const size_t block_;
  const int64_t used_, depth_;
};
