#include "runtime/buffer.hpp"

#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvferry {
namespace {

constexpr size_t kHugePage = size_t(2) << 20;
#if defined(KVFERRY_POISON)
constexpr bool kPoison = true;  // in kvferry_check: fill with NaN, so that a read before a write is detected
#else
constexpr bool kPoison = false;
#endif

}  // namespace

Buffer::~Buffer() { std::free(data_); }
Buffer::Buffer(Buffer&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
  other.data_ = nullptr;
  other.bytes_ = 0;
}

void* Buffer::reserve(size_t bytes) {
  if (bytes <= bytes_) {
    if (kPoison) std::memset(data_, 0xff, bytes_);
    return data_;
  }
  std::free(data_);
  data_ = nullptr;
  bytes_ = 0;
  const size_t alignment = bytes >= kHugePage ? kHugePage : 64,
               rounded = (bytes + alignment - 1) / alignment * alignment;
  data_ = static_cast<uint8_t*>(std::aligned_alloc(alignment, rounded));
  if (!data_) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment == kHugePage) madvise(data_, rounded, MADV_HUGEPAGE);
#endif
  std::memset(data_, kPoison ? 0xff : 0, rounded);
  bytes_ = rounded;
  return data_;
}

}  // namespace kvferry
