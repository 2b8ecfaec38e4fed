// A fake GPU as a trainer's own CUDA code would use a real one: streams that work on host memory.
// From the library that FARANDOLE_CUDA_PLUGIN names; it is a fake, and proves order, errors and
// arithmetic.
#pragma once

#include <dlfcn.h>
#include <farandole/device.h>

#include <cstdint>
#include <cstdlib>
#include <vector>

#include "check.h"

class FakeStream {
 public:
  explicit FakeStream(int device)
      : stream_{device, Function<void*(int)>("farandole_fake_stream_create")(device)} {
    EXPECT(stream_.handle != nullptr);
  }
  // One that is there already.
  explicit FakeStream(const farandole::Stream& stream) : stream_(stream), is_mine_(false) {}
  FakeStream(const FakeStream&) = delete;
  ~FakeStream() {
    if (is_mine_) Call("farandole_fake_stream_destroy");
  }
  operator const farandole::Stream&() const { return stream_; }

  // `values`, taken now, are in `to` when the stream has come to it and the delay has passed.
  template <class T>
  void Write(std::vector<T>& to, const std::vector<T>& values, std::int64_t delay_us) {
    const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(T));
    Write(to.data(), values.data(), bytes, delay_us);
  }
  void Write(void* to, const void* values, std::int64_t bytes, std::int64_t delay_us) {
    using Call = int(int, void*, void*, const void*, std::int64_t, std::int64_t);
    EXPECT(Function<Call>("farandole_fake_stream_write")(stream_.device, stream_.handle, to, values,
                                                         bytes, delay_us) == 0);
  }
  // What is in `from` when the stream has come to it, after the host waited for that.
  template <class T>
  std::vector<T> Read(const std::vector<T>& from) {
    std::vector<T> seen(from.size());
    using Copy = int(int, void*, void*, const void*, std::int64_t);
    const auto bytes = static_cast<std::int64_t>(from.size() * sizeof(T));
    EXPECT(Function<Copy>("farandole_fake_stream_copy")(stream_.device, stream_.handle, seen.data(),
                                                        from.data(), bytes) == 0);
    Synchronize();
    return seen;
  }
  void Synchronize() { Call("farandole_fake_stream_synchronize"); }
  // Between the two nothing in the stream begins.
  void Hold() { Call("farandole_fake_stream_hold"); }
  void Release() { Call("farandole_fake_stream_release"); }
  void BeginCapture() { Call("farandole_fake_stream_begin_capture"); }
  void EndCapture() { Call("farandole_fake_stream_end_capture"); }

 private:
  template <class Signature>
  static Signature* Function(const char* name) {
    static void* const library = dlopen(std::getenv("FARANDOLE_CUDA_PLUGIN"), RTLD_NOW);
    EXPECT(library != nullptr);
    void* const symbol = dlsym(library, name);
    EXPECT(symbol != nullptr);
    return reinterpret_cast<Signature*>(symbol);
  }
  void Call(const char* name) {
    EXPECT(Function<int(int, void*)>(name)(stream_.device, stream_.handle) == 0);
  }

  farandole::Stream stream_;
  bool is_mine_ = true;
};
