#include "bindings/python/arrays.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>

#include "bindings/python/errors.h"

namespace farandole::python {
namespace py = pybind11;
namespace {

constexpr uint32_t kDlpackMajor = DLPACK_MAJOR_VERSION;

/// By type; both guarded by the GIL. Types are kept alive: an address must not come to mean
/// another.
struct Registry {
  std::unordered_map<PyTypeObject*, std::unique_ptr<ArrayType>> known;
  std::vector<std::pair<py::object, py::object>> registered;  // (type, library)
  std::vector<std::unique_ptr<ArrayType>> retired;            // Arrays may still refer to them.
};

Registry& TheRegistry() {
  static auto* const registry = new Registry;  // Never destroyed: Python may have gone by then.
  return *registry;
}

const DLPackExchangeAPI* ExchangeApiOf(py::handle type) {
  const auto capsule = py::getattr(type, "__dlpack_c_exchange_api__", py::none());
  if (!PyCapsule_CheckExact(capsule.ptr())) return nullptr;
  auto* header = static_cast<DLPackExchangeAPIHeader*>(
      PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (header == nullptr) PyErr_Clear();
  while (header != nullptr && header->version.major > kDlpackMajor) header = header->prev_api;
  if (header == nullptr || header->version.major != kDlpackMajor) return nullptr;
  auto* const api = reinterpret_cast<const DLPackExchangeAPI*>(header);
  return api->dltensor_from_py_object_no_sync == nullptr ? nullptr : api;
}

py::object RegisteredLibraryOf(py::handle type) {
  for (const auto& [base, library] : TheRegistry().registered)
    if (PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type.ptr()),
                         reinterpret_cast<PyTypeObject*>(base.ptr())))
      return library;
  return py::none();
}

bool FlagOf(const py::object& library, const char* name) {
  return py::getattr(library, name, py::bool_(false)).cast<bool>();
}

std::unique_ptr<ArrayType> Describe(py::handle object, py::handle type) {
  py::object library = RegisteredLibraryOf(type);
  if (library.is_none()) {
    library = py::module_::import("farandole._libraries").attr("library_of")(object);
    const py::object imported = RegisteredLibraryOf(type);  // library_of may import a frontend
    if (!imported.is_none()) library = imported;
  }
  auto described = std::make_unique<ArrayType>();
  described->is_read_by_library = py::hasattr(library, "read");
  described->is_looked_at_by_library = py::hasattr(library, "look");
  if (!described->is_read_by_library) described->api = ExchangeApiOf(type);
  described->is_mutable = FlagOf(library, "is_mutable");
  if (FlagOf(library, "is_lazy")) {
    described->is_neg = type.attr("is_neg");
    described->is_conj = type.attr("is_conj");
  }
  described->opaque_dtypes = py::getattr(library, "opaque_dtypes", py::object());
  described->notes_writes = py::hasattr(library, "written");
  described->written_in_place = py::getattr(library, "written_in_place", py::none());
  described->converts_results = py::hasattr(library, "result");
  described->is_numpy = py::isinstance<py::array>(object);
  described->library = std::move(library);
  return described;
}

bool IsCOrder(int32_t ndim, const int64_t* shape, const int64_t* strides, int64_t unit) {
  if (strides == nullptr) return true;
  int64_t expected = unit;
  bool is_c_order = true;
  for (int32_t i = ndim - 1; i >= 0; --i) {
    if (shape[i] == 0) return true;
    if (shape[i] != 1 && strides[i] != expected) is_c_order = false;
    expected *= shape[i];
  }
  return is_c_order;
}

/// Takes over what a producer says; false for memory elsewhere than in the host and on NVIDIA GPUs.
bool Adopt(Array& array, const DLTensor& tensor) {
  array.device = tensor.device;
  if (tensor.device.device_type == kDLCUDAManaged) array.device.device_type = kDLCUDA;
  if (tensor.device.device_type == kDLCUDAHost) array.device = {kDLCPU, 0};
  if (array.device.device_type != kDLCPU && !array.is_cuda()) return false;
  array.dtype = tensor.dtype;
  array.ndim = tensor.ndim;
  array.shape = tensor.shape;
  array.is_contiguous = IsCOrder(tensor.ndim, tensor.shape, tensor.strides, 1);
  array.data = AddressOf(tensor);
  return true;
}

/// Whether the memory does not hold the values: DLPack has no word for that.
bool IsLazy(const Array& array) {
  const auto answers = [&](const py::object& question) {
    PyObject* const self = array.object.ptr();
    const auto answer =
        py::reinterpret_steal<py::object>(PyObject_Vectorcall(question.ptr(), &self, 1, nullptr));
    if (!answer) throw py::error_already_set();
    return answer.is(py::handle(Py_True));
  };
  return answers(array.type->is_neg) ||
         (array.dtype.code == kDLComplex && answers(array.type->is_conj));
}

/// Whether DLPack says another dtype than the array's, as of torch's int4, or ends the process, as
/// of TensorFlow's strings.
bool IsOpaque(const Array& array) {
  const py::object& dtypes = array.type->opaque_dtypes;
  if (!dtypes) return false;
  const int found = PySet_Contains(dtypes.ptr(), array.object.attr("dtype").ptr());
  if (found < 0) throw py::error_already_set();
  return found == 1;
}

bool ReadByApi(Array& array) {
  DLTensor tensor;
  if (array.type->api->dltensor_from_py_object_no_sync(array.object.ptr(), &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  array.is_writable = array.type->is_mutable;
  if (!Adopt(array, tensor)) return false;
  const bool is_byte = array.dtype.bits == 8 && array.dtype.code <= kDLUInt;
  if (is_byte && IsOpaque(array)) return false;
  if (array.type->is_neg && IsLazy(array)) array.is_contiguous = false;
  return true;
}

struct NamedDType {
  const char* name;
  DLDataType dtype;
};
// In the order of farandole_dtype.
constexpr std::array<NamedDType, 17> kNames = {{
    {"bool", {kDLBool, 8, 1}},
    {"uint8", {kDLUInt, 8, 1}},
    {"int8", {kDLInt, 8, 1}},
    {"int16", {kDLInt, 16, 1}},
    {"int32", {kDLInt, 32, 1}},
    {"int64", {kDLInt, 64, 1}},
    {"float16", {kDLFloat, 16, 1}},
    {"bfloat16", {kDLBfloat, 16, 1}},
    {"float32", {kDLFloat, 32, 1}},
    {"float64", {kDLFloat, 64, 1}},
    {"uint16", {kDLUInt, 16, 1}},
    {"uint32", {kDLUInt, 32, 1}},
    {"uint64", {kDLUInt, 64, 1}},
    {"complex64", {kDLComplex, 64, 1}},
    {"complex128", {kDLComplex, 128, 1}},
    {"float8_e4m3fn", {kDLFloat8_e4m3fn, 8, 1}},
    {"float8_e5m2", {kDLFloat8_e5m2, 8, 1}},
}};
static_assert(kNames.size() == FARANDOLE_FLOAT8_E5M2 + 1);

std::optional<DLDataType> OfName(std::string_view name) {
  for (const NamedDType& known : kNames)
    if (name == known.name) return known.dtype;
  return std::nullopt;
}

bool ReadByLibrary(Array& array) {
  const py::object read = array.type->library.attr("read")(array.object);
  if (read.is_none()) return false;
  const auto [address, name, shape, is_contiguous, device, is_writable] =
      read.cast<std::tuple<uintptr_t, std::string, py::tuple, bool, int32_t, bool>>();
  const std::optional<DLDataType> dtype = OfName(name);
  if (!dtype) return false;
  array.dtype = *dtype;
  array.data = reinterpret_cast<void*>(address);
  for (const py::handle length : shape) array.own_shape.push_back(length.cast<int64_t>());
  array.ndim = static_cast<int32_t>(array.own_shape.size());
  array.shape = array.own_shape.data();
  array.is_contiguous = is_contiguous;
  array.is_writable = is_writable;
  if (device >= 0) array.device = {kDLCUDA, device};
  return true;
}

/// Dtypes that extend NumPy, such as bfloat16, have a name and no kind of their own.
std::optional<DLDataType> OfNumPy(const py::dtype& dtype) {
  constexpr int kUserDefined = 256;  // NPY_USERDEF
  constexpr char kForeign = std::endian::native == std::endian::little ? '>' : '<';
  const auto bits = static_cast<uint8_t>(8 * dtype.itemsize());
  if (dtype.byteorder() == kForeign) return std::nullopt;
  if (dtype.num() >= kUserDefined) return OfName(py::str(dtype.attr("name")).cast<std::string>());
  switch (dtype.kind()) {
    case 'b':
      return DLDataType{kDLBool, bits, 1};
    case 'i':
      return DLDataType{kDLInt, bits, 1};
    case 'u':
      return DLDataType{kDLUInt, bits, 1};
    case 'f':
      return DLDataType{kDLFloat, bits, 1};
    case 'c':
      return DLDataType{kDLComplex, bits, 1};
    default:
      return std::nullopt;
  }
}

/// The shape is copied: NumPy's own goes when somebody assigns to it.
bool ReadNumPy(Array& array) {
  const auto source = py::reinterpret_borrow<py::array>(array.object);
  const std::optional<DLDataType> dtype = OfNumPy(source.dtype());
  if (!dtype) return false;
  static_assert(sizeof(py::ssize_t) == sizeof(int64_t));
  array.dtype = *dtype;
  array.data = const_cast<void*>(source.data());
  array.ndim = static_cast<int32_t>(source.ndim());
  array.own_shape.assign(source.shape(), source.shape() + source.ndim());
  array.shape = array.own_shape.data();
  array.is_contiguous =
      IsCOrder(array.ndim, array.shape, reinterpret_cast<const int64_t*>(source.strides()),
               source.itemsize());
  array.is_writable = source.writeable();
  return true;
}

/// Some are NumPy's own, others those of the package ml_dtypes, when it has been imported.
py::dtype NumPyDType(DLDataType dtype) {
  const std::string name = NameOf(dtype);
  try {
    return py::dtype(name);
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;
  }
  try {
    return py::dtype::from_args(py::module_::import("ml_dtypes").attr(name.c_str()));
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_ImportError)) throw;
    throw py::type_error("NumPy has no " + name + ": install the package ml_dtypes, which has");
  }
}

/// NumPy's dtype of an array that is NumPy's, or that any library has in host memory.
py::dtype NumPyDType(const Array& array) {
  if (array.type->is_numpy) return py::reinterpret_borrow<py::array>(array.object).dtype();
  return NumPyDType(array.dtype);
}

/// Whether results for arrays like this one are made by NumPy; the library may convert them.
bool MadeByNumPy(const ArrayType& type, DLDevice device) {
  return type.api == nullptr && !type.is_read_by_library && device.device_type == kDLCPU;
}

/// The dtype of one element in the notation of the module struct; of native byte order only.
std::optional<DLDataType> OfFormat(const char* format, Py_ssize_t size_bytes) {
  if (format == nullptr) format = "B";
  if (*format == '@' || *format == '=' || *format == '<') ++format;
  const bool is_complex = *format == 'Z';
  if (is_complex) ++format;
  if (std::strlen(format) != 1) return std::nullopt;
  const auto bits = static_cast<uint8_t>(8 * size_bytes);
  if (std::strchr("efdg", *format) != nullptr) {
    if (size_bytes > 16) return std::nullopt;
    return DLDataType{static_cast<uint8_t>(is_complex ? kDLComplex : kDLFloat), bits, 1};
  }
  if (is_complex || size_bytes > 8) return std::nullopt;
  if (*format == '?') return DLDataType{kDLBool, bits, 1};
  if (std::strchr("bhilqn", *format) != nullptr) return DLDataType{kDLInt, bits, 1};
  if (std::strchr("BHILQN", *format) != nullptr) return DLDataType{kDLUInt, bits, 1};
  return std::nullopt;
}

bool ReadByBuffer(Array& array) {
  array.owner = py::reinterpret_steal<py::object>(PyMemoryView_FromObject(array.object.ptr()));
  if (!array.owner) {
    PyErr_Clear();
    return false;
  }
  const Py_buffer& view = *PyMemoryView_GET_BUFFER(array.owner.ptr());
  const std::optional<DLDataType> dtype = OfFormat(view.format, view.itemsize);
  if (!dtype) return false;
  array.dtype = *dtype;
  array.data = view.buf;
  array.ndim = view.ndim;
  static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
  array.shape = reinterpret_cast<const int64_t*>(view.shape);
  array.is_contiguous = IsCOrder(view.ndim, array.shape,
                                 reinterpret_cast<const int64_t*>(view.strides), view.itemsize) &&
                        view.suboffsets == nullptr;
  array.is_writable = view.readonly == 0;
  return true;
}

/// The capsule is never consumed: it releases the memory when it goes, as its producer arranged.
bool ReadByDlpack(Array& array) {
  if (!py::hasattr(array.object, "__dlpack__")) return false;
  const auto device = array.object.attr("__dlpack_device__")().cast<std::pair<int, int>>();
  const bool is_cuda = device.first == kDLCUDA || device.first == kDLCUDAManaged;
  const py::object stream = is_cuda ? py::object(py::int_(1)) : py::object(py::none());
  const py::object dlpack = array.object.attr("__dlpack__");
  try {
    array.owner = dlpack(py::arg("stream") = stream, py::arg("max_version") = py::make_tuple(1, 3));
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_TypeError)) throw;
    array.owner = dlpack(py::arg("stream") = stream);  // a producer before version 1
  }
  if (auto* const versioned = static_cast<DLManagedTensorVersioned*>(
          PyCapsule_GetPointer(array.owner.ptr(), "dltensor_versioned"))) {
    constexpr uint64_t kNotOurs = DLPACK_FLAG_BITMASK_READ_ONLY | DLPACK_FLAG_BITMASK_IS_COPIED;
    array.is_writable = (versioned->flags & kNotOurs) == 0;
    return versioned->version.major == kDlpackMajor && Adopt(array, versioned->dl_tensor);
  }
  PyErr_Clear();
  auto* const managed =
      static_cast<DLManagedTensor*>(PyCapsule_GetPointer(array.owner.ptr(), "dltensor"));
  if (managed == nullptr) throw py::error_already_set();
  return Adopt(array, managed->dl_tensor);  // of which nobody says whether it may be changed
}

bool ReadByAnything(Array& array) {
  if (array.type->api != nullptr) return ReadByApi(array);
  if (array.type->is_read_by_library) return ReadByLibrary(array);
  if (array.type->is_numpy) return ReadNumPy(array);
  if (IsOpaque(array)) return false;
  if (PyObject_CheckBuffer(array.object.ptr()) && ReadByBuffer(array)) return true;
  return ReadByDlpack(array);
}

/// Whether there are elements and no memory, as of torch's DTensor, which is a shape over another.
bool LacksMemory(const Array& array) {
  const int64_t* const end = array.shape + array.ndim;
  return array.data == nullptr && std::find(array.shape, end, 0) == end;
}

/// What an allocator of DLPack says when it fails.
struct AllocatorError {
  std::string text;
  static void Set(void* self, const char* kind, const char* message) {
    static_cast<AllocatorError*>(self)->text = std::string(kind) + ": " + message;
  }
};

/// Borrows the shape.
DLTensor Prototype(DLDevice device, DLDataType dtype, const std::vector<int64_t>& shape) {
  return {nullptr,
          device,
          static_cast<int32_t>(shape.size()),
          dtype,
          const_cast<int64_t*>(shape.data()),
          nullptr,
          0};
}

Array MakeByApi(const Array& like, const std::vector<int64_t>& shape) {
  const DLPackExchangeAPI& api = *like.type->api;
  DLTensor prototype = Prototype(like.device, like.dtype, shape);
  DLManagedTensorVersioned* made = nullptr;
  AllocatorError error;
  if (api.managed_tensor_allocator(&prototype, &made, &error, AllocatorError::Set) != 0) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    ThrowInternal(("no memory for the result: " + error.text).c_str());
  }
  Array array;
  array.type = like.type;
  (void)Adopt(array, made->dl_tensor);
  array.own_shape = shape;
  array.shape = array.own_shape.data();
  array.is_contiguous = array.is_writable = true;
  array.object = Adopted(*like.type, ManagedTensor(made));
  return array;
}

py::tuple ToTuple(const std::vector<int64_t>& shape) {
  py::tuple tuple(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) tuple[i] = shape[i];
  return tuple;
}

}  // namespace

const ArrayType& TypeOf(py::handle object) {
  Registry& registry = TheRegistry();
  PyTypeObject* const type = Py_TYPE(object.ptr());
  const auto known = registry.known.find(type);
  if (known != registry.known.end()) return *known->second;
  std::unique_ptr<ArrayType> described = Describe(object, reinterpret_cast<PyObject*>(type));
  // Describe runs Python: another thread may have described the type meanwhile, and use it.
  const auto [entry, is_new] = registry.known.try_emplace(type, std::move(described));
  if (is_new) Py_INCREF(type);
  return *entry->second;
}

void UseLibrary(const py::object& type, const py::object& library) {
  Registry& registry = TheRegistry();
  std::erase_if(registry.registered, [&](const auto& pair) { return pair.first.is(type); });
  if (!library.is_none()) registry.registered.emplace_back(type, library);
  for (auto& [_, described] : registry.known) registry.retired.push_back(std::move(described));
  registry.known.clear();
}

std::optional<int32_t> ToNumber(DLDataType dtype) {
  for (size_t number = 0; number < kNames.size(); ++number)
    if (IsSame(dtype, kNames[number].dtype)) return static_cast<int32_t>(number);
  return std::nullopt;
}

DLDataType OfNumber(int32_t number) { return kNames.at(static_cast<size_t>(number)).dtype; }

py::tuple DTypeNames() {
  py::tuple names(kNames.size());
  for (size_t i = 0; i < kNames.size(); ++i) names[i] = kNames[i].name;
  return names;
}

std::string NameOf(DLDataType dtype) {
  for (const NamedDType& known : kNames)
    if (IsSame(known.dtype, dtype)) return known.name;
  return "DLPack dtype code " + std::to_string(dtype.code) + " of " + std::to_string(dtype.bits) +
         " bits";
}

bool IsSame(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

bool IsCOrder(const DLTensor& tensor) {
  return IsCOrder(tensor.ndim, tensor.shape, tensor.strides, 1);
}

void* AddressOf(const DLTensor& tensor) {
  return tensor.data == nullptr ? nullptr
                                : static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
}

namespace {

std::optional<Layout> LookByLibrary(const ArrayType& type, py::handle object) {
  const py::object look = type.library.attr("look")(object);
  if (look.is_none()) return std::nullopt;
  const auto [address, name, shape, strides, device] =
      look.cast<std::tuple<uintptr_t, std::string, py::tuple, py::tuple, int32_t>>();
  const std::optional<DLDataType> dtype = OfName(name);
  if (!dtype) return std::nullopt;
  Layout layout;
  for (const py::tuple& numbers : {shape, strides})
    for (const py::handle number : numbers) layout.own.push_back(number.cast<int64_t>());
  const DLDevice on = device >= 0 ? DLDevice{kDLCUDA, device} : DLDevice{kDLCPU, 0};
  layout.tensor = {reinterpret_cast<void*>(address),
                   on,
                   static_cast<int32_t>(shape.size()),
                   *dtype,
                   layout.own.data(),
                   layout.own.data() + shape.size(),
                   0};
  return layout;
}

}  // namespace

std::optional<Layout> Peek(py::handle object) {
  const ArrayType& type = TypeOf(object);
  if (type.api == nullptr)
    return type.is_looked_at_by_library ? LookByLibrary(type, object) : std::nullopt;
  Layout layout;
  if (type.api->dltensor_from_py_object_no_sync(object.ptr(), &layout.tensor) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  return layout;
}

std::optional<Array> Read(py::handle object) {
  Array array;
  array.type = &TypeOf(object);
  array.object = py::reinterpret_borrow<py::object>(object);
  try {
    if (ReadByAnything(array) && !LacksMemory(array)) return array;
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // else the library says better what is wrong
  }
  return std::nullopt;
}

Array MakeLike(const Array& like, const std::vector<int64_t>& shape) {
  if (like.type->api != nullptr) return MakeByApi(like, shape);
  py::object made;
  if (MadeByNumPy(*like.type, like.device)) {
    made = py::array(NumPyDType(like), shape);
  } else {
    made = like.type->library.attr("empty")(like.object, ToTuple(shape));
  }
  std::optional<Array> array = Read(made);
  if (!array || array->device.device_type != like.device.device_type)
    throw py::type_error("there is no way to make an array for the result where the given one is");
  return std::move(*array);
}

ManagedTensor Allocate(const ArrayType& type, DLDevice device, DLDataType dtype,
                       const std::vector<int64_t>& shape) {
  DLTensor prototype = Prototype(device, dtype, shape);
  DLManagedTensorVersioned* made = nullptr;
  AllocatorError error;
  const int failed =
      type.api->managed_tensor_allocator(&prototype, &made, &error, AllocatorError::Set);
  return ManagedTensor(failed == 0 ? made : nullptr);
}

py::object Adopted(const ArrayType& type, ManagedTensor made) {
  void* object = nullptr;
  if (type.api->managed_tensor_to_py_object_no_sync(made.release(), &object) != 0)
    throw py::error_already_set();
  return py::reinterpret_steal<py::object>(static_cast<PyObject*>(object));
}

farandole_stream CurrentStream(const ArrayType& type, py::handle object, DLDevice device) {
  farandole_stream stream{sizeof(farandole_stream), device.device_id, nullptr};
  if (type.api != nullptr) {
    if (type.api->current_work_stream(device.device_type, device.device_id, &stream.stream) != 0)
      throw py::error_already_set();
  } else if (py::hasattr(type.library, "stream")) {
    const auto [number, handle] =
        type.library.attr("stream")(object).cast<std::pair<int32_t, uintptr_t>>();
    stream.device = number;
    stream.stream = reinterpret_cast<void*>(handle);
  }
  return stream;
}

ResultMemory::ResultMemory(farandole_buffer* buffer, const Array& like, std::vector<int64_t> shape)
    : buffer_(buffer),
      device_(like.device),
      dtype_(like.dtype),
      shape_(std::move(shape)),
      strides_(shape_.size(), 1) {
  for (size_t i = shape_.size(); i-- > 1;) strides_[i - 1] = strides_[i] * shape_[i];
}

ResultMemory::ResultMemory(farandole_buffer* buffer)
    : buffer_(buffer),
      device_{kDLCPU, 0},
      dtype_{kDLUInt, 8, 1},
      shape_{farandole_buffer_bytes(buffer)},
      strides_{1} {}

// On a GPU this waits until nothing uses the memory. The last array may go on any thread.
ResultMemory::~ResultMemory() {
  std::optional<py::gil_scoped_release> release;
  if (PyGILState_Check() != 0) release.emplace();
  farandole_buffer_release(buffer_);
}

DLManagedTensorVersioned* ResultMemory::Export(const std::shared_ptr<ResultMemory>& self) {
  struct Exported {
    DLManagedTensorVersioned managed;
    std::shared_ptr<ResultMemory> memory;
  };
  auto* const exported = new Exported{{}, self};
  DLManagedTensorVersioned& managed = exported->managed;
  managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
  managed.manager_ctx = exported;
  managed.deleter = [](DLManagedTensorVersioned* gone) {
    delete static_cast<Exported*>(gone->manager_ctx);
  };
  managed.dl_tensor = {self->size_bytes() == 0 ? nullptr : self->data(),
                       self->device_,
                       static_cast<int32_t>(self->shape_.size()),
                       self->dtype_,
                       self->shape_.data(),
                       self->strides_.data(),
                       0};
  return &managed;
}

py::capsule ResultMemory::ToDlpack(const std::shared_ptr<ResultMemory>& self) {
  return py::capsule(Export(self), "dltensor_versioned", [](PyObject* capsule) {
    void* const unused = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    if (unused == nullptr) return PyErr_Clear();  // renamed: somebody took it
    auto* const managed = static_cast<DLManagedTensorVersioned*>(unused);
    managed->deleter(managed);
  });
}

py::tuple ResultMemory::DlpackDevice() const {
  return py::make_tuple(static_cast<int>(device_.device_type), device_.device_id);
}

py::object ResultMemory::ToArray(const std::shared_ptr<ResultMemory>& self, const ArrayType& type,
                                 const py::object& like) {
  if (MadeByNumPy(type, self->device_))
    return py::array(NumPyDType(self->dtype_), self->shape_, self->data(), py::cast(self));
  if (type.api == nullptr) return type.library.attr("wrap")(self, like, ToTuple(self->shape_));
  return Adopted(type, ManagedTensor(Export(self)));
}

}  // namespace farandole::python
