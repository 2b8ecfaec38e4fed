// How the extension reads, makes and hands out arrays of any library.
//
// An array is read by the first of: DLPack's C functions, which its type offers as
// `__dlpack_c_exchange_api__` (DLPack 1.3: no attribute of the array is looked up); what the Python
// object of its library answers (`read`, see farandole/_libraries.py); NumPy's own struct; the
// buffer protocol, which tells host memory and what may be written; `__dlpack__`. What none of them
// can give as it is (a strided array, say) the library's `canonical` copies, or refuses with an
// error of its own.
//
// Everything here needs the GIL.
#pragma once

#include <dlpack/dlpack.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bindings/c/farandole.h"

namespace farandole::python {

/// Keeps blocks of one element to be used again: with hundreds of works in flight malloc and free
/// take as long as all the rest of a start. Needs the GIL.
template <class T>
struct Pooled {
  using value_type = T;
  static constexpr size_t kMostKept = 1024;

  Pooled() = default;
  template <class U>
  Pooled(const Pooled<U>&) {}  // NOLINT: implicit, as allocators are
  T* allocate(size_t count) {
    std::vector<void*>& kept = Kept();
    if (count != 1 || kept.empty()) return static_cast<T*>(::operator new(count * sizeof(T)));
    void* const block = kept.back();
    kept.pop_back();
    return static_cast<T*>(block);
  }
  void deallocate(T* block, size_t count) {
    std::vector<void*>& kept = Kept();
    if (count != 1 || kept.size() == kMostKept) return ::operator delete(block);
    kept.push_back(block);
  }
  static std::vector<void*>& Kept() {
    static auto* const kept = [] {  // never destroyed: works may go at the very end
      auto* const made = new std::vector<void*>;
      made->reserve(kMostKept);
      return made;
    }();
    return *kept;
  }
  template <class U>
  bool operator==(const Pooled<U>&) const {
    return true;
  }
};

/// What is known of a Python type of arrays. Lives as long as the process.
struct ArrayType {
  pybind11::object library;                ///< Of farandole/_libraries.py, or registered.
  const DLPackExchangeAPI* api = nullptr;  ///< nullptr: the type offers none.
  bool is_read_by_library = false;         ///< library.read() is asked instead of the array.
  bool is_looked_at_by_library = false;    ///< library.look() is asked where there is no api.
  bool is_numpy = false;                   ///< numpy.ndarray, which is read by its C struct.
  bool is_mutable = false;                 ///< Arrays may be changed in place.
  bool notes_writes = false;               ///< library.written() wants to know of changes in place.
  /// Arrays may be views that conjugate or negate (torch): methods of the type; else null.
  pybind11::object is_neg, is_conj;
  /// library.opaque_dtypes: a set of those that DLPack does not tell, or cannot; null: none.
  pybind11::object opaque_dtypes;
  pybind11::object written_in_place;  ///< library.written_in_place; None: `written` is enough.
  bool converts_results = false;      ///< library.result() makes what users get.
};

struct ManagedTensorDeleter {
  void operator()(DLManagedTensorVersioned* gone) const {
    if (gone->deleter != nullptr) gone->deleter(gone);
  }
};
/// A tensor of DLPack with its memory.
using ManagedTensor = std::unique_ptr<DLManagedTensorVersioned, ManagedTensorDeleter>;

/// The type of `object`, described by farandole._libraries.library_of() when it is first seen.
const ArrayType& TypeOf(pybind11::handle object);
/// Arrays of `type` and of its subclasses are `library`'s from now on; None: as they were.
void UseLibrary(const pybind11::object& type, const pybind11::object& library);

/// One array's memory, borrowed. Keeps its object alive, and what its library gave for the memory.
struct Array {
  const ArrayType* type = nullptr;
  pybind11::object object;
  pybind11::object owner;  ///< A memoryview or a DLPack capsule; may be null.
  void* data = nullptr;    ///< nullptr: there may be no elements.
  DLDevice device{kDLCPU, 0};
  DLDataType dtype{};
  int32_t ndim = 0;
  const int64_t* shape = nullptr;  ///< [ndim]; the object's own, or own_shape.
  std::vector<int64_t> own_shape;
  bool is_contiguous = false;  ///< In C order without gaps.
  bool is_writable = false;

  bool is_cuda() const { return device.device_type == kDLCUDA; }
};

using Arrays = std::vector<Array, Pooled<Array>>;

/// The farandole_dtype; nullopt if there is none.
std::optional<int32_t> ToNumber(DLDataType dtype);
/// Of a farandole_dtype.
DLDataType OfNumber(int32_t number);
/// NumPy's names of all dtypes, in the order of farandole_dtype.
pybind11::tuple DTypeNames();
/// "float32", "complex64": for messages.
std::string NameOf(DLDataType dtype);

/// Reads an array as it is; nullopt, and no exception, if nothing can read it or its memory is
/// neither the host's nor an NVIDIA GPU's.
std::optional<Array> Read(pybind11::handle object);

/// An array as it lies in memory.
struct Layout {
  Layout() = default;
  Layout(Layout&&) = default;  // leaves `own` where it is, to which `tensor` points
  Layout& operator=(Layout&&) = default;

  DLTensor tensor{};
  std::vector<int64_t> own;  ///< Shape and strides where they are not the object's own.
};
/// What DLPack's C functions tell of an array or, where its type has none, `look` of its library
/// (farandole/torch/_compat.py); nullopt, and no exception, if they cannot tell. Elements may be
/// negated lazily (torch).
std::optional<Layout> Peek(pybind11::handle object);
/// Whether the elements lie in C order without gaps.
bool IsCOrder(const DLTensor& tensor);
/// Where the elements are; nullptr: there are none.
void* AddressOf(const DLTensor& tensor);
bool IsSame(DLDataType a, DLDataType b);

/// A new array for a result, like `like` but of this shape; what it holds is undefined.
/// @throw what the library raises; HorovodInternalError without memory.
Array MakeLike(const Array& like, const std::vector<int64_t>& shape);

/// Memory for a result in a tensor of a framework, in the order of the calling
/// thread's current stream; on any thread, without the GIL. @return nullptr if there is none.
/// @param type  Has DLPack's C functions.
ManagedTensor Allocate(const ArrayType& type, DLDevice device, DLDataType dtype,
                       const std::vector<int64_t>& shape);
/// The array of such memory, which it takes over.
pybind11::object Adopted(const ArrayType& type, ManagedTensor made);

/// The stream in which the calling thread makes and uses arrays like this one now.
/// @param device  Of the array: a GPU.
farandole_stream CurrentStream(const ArrayType& type, pybind11::handle object, DLDevice device);

/// A result in the library's memory, and how it becomes an array. Speaks the buffer protocol (host
/// memory) and DLPack; the memory lives as long as this or an array made of it.
class ResultMemory {
 public:
  ResultMemory(farandole_buffer* buffer, const Array& like, std::vector<int64_t> shape);
  /// Bytes in host memory.
  explicit ResultMemory(farandole_buffer* buffer);
  ~ResultMemory();
  ResultMemory(const ResultMemory&) = delete;
  ResultMemory& operator=(const ResultMemory&) = delete;

  void* data() const { return farandole_buffer_data(buffer_); }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(data()); }
  int64_t size_bytes() const { return farandole_buffer_bytes(buffer_); }
  /// A capsule that owns a share of the memory.
  static pybind11::capsule ToDlpack(const std::shared_ptr<ResultMemory>& self);
  pybind11::tuple DlpackDevice() const;
  /// An array of `type`, like `like`, over this memory.
  static pybind11::object ToArray(const std::shared_ptr<ResultMemory>& self, const ArrayType& type,
                                  const pybind11::object& like);

 private:
  static DLManagedTensorVersioned* Export(const std::shared_ptr<ResultMemory>& self);
  farandole_buffer* const buffer_;
  const DLDevice device_;
  const DLDataType dtype_;
  std::vector<int64_t> shape_;
  std::vector<int64_t> strides_;
};

}  // namespace farandole::python
