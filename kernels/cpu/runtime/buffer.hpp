// Aligned memory that is reused between steps and only grows.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvferry {

// A 64-byte aligned buffer. From 2 MiB on, it is aligned to 2 MiB and backed by huge pages.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept;
  // Returns memory of at least `bytes` bytes. If it is reallocated, it is zeroed and the earlier content is lost.
  void* reserve(size_t bytes);
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace kvferry
