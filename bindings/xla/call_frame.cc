#include "bindings/xla/call_frame.h"

#include <cstring>
#include <string_view>

namespace farandole::xla {
namespace {

/// The farandole_dtype and the bytes of an element; -1 for what no collective takes.
struct Element {
  int32_t dtype;
  int64_t size_bytes;
};

Element ElementOf(XLA_FFI_DataType type) {
  switch (static_cast<int>(type)) {
    case XLA_FFI_DataType_PRED:
      return {FARANDOLE_BOOL, 1};
    case XLA_FFI_DataType_U8:
      return {FARANDOLE_UINT8, 1};
    case XLA_FFI_DataType_S8:
      return {FARANDOLE_INT8, 1};
    case XLA_FFI_DataType_S16:
      return {FARANDOLE_INT16, 2};
    case XLA_FFI_DataType_S32:
      return {FARANDOLE_INT32, 4};
    case XLA_FFI_DataType_S64:
      return {FARANDOLE_INT64, 8};
    case XLA_FFI_DataType_F16:
      return {FARANDOLE_FLOAT16, 2};
    case XLA_FFI_DataType_BF16:
      return {FARANDOLE_BFLOAT16, 2};
    case XLA_FFI_DataType_F32:
      return {FARANDOLE_FLOAT32, 4};
    case XLA_FFI_DataType_F64:
      return {FARANDOLE_FLOAT64, 8};
    case XLA_FFI_DataType_U16:
      return {FARANDOLE_UINT16, 2};
    case XLA_FFI_DataType_U32:
      return {FARANDOLE_UINT32, 4};
    case XLA_FFI_DataType_U64:
      return {FARANDOLE_UINT64, 8};
    case XLA_FFI_DataType_C64:
      return {FARANDOLE_COMPLEX64, 8};
    case XLA_FFI_DataType_C128:
      return {FARANDOLE_COMPLEX128, 16};
    case XLA_FFI_DataType_F8E4M3FN:
      return {FARANDOLE_FLOAT8_E4M3FN, 1};
    case XLA_FFI_DataType_F8E5M2:
      return {FARANDOLE_FLOAT8_E5M2, 1};
    default:
      return {-1, 0};
  }
}

XLA_FFI_Error_Code CodeOf(int code) {
  switch (code) {
    case FARANDOLE_INVALID_ARGUMENT:
      return XLA_FFI_Error_Code_INVALID_ARGUMENT;
    case FARANDOLE_MISMATCH:
      return XLA_FFI_Error_Code_FAILED_PRECONDITION;
    case FARANDOLE_TIMEOUT:
      return XLA_FFI_Error_Code_DEADLINE_EXCEEDED;
    case FARANDOLE_UNAVAILABLE:
      return XLA_FFI_Error_Code_UNAVAILABLE;
    case FARANDOLE_RESOURCE_EXHAUSTED:
      return XLA_FFI_Error_Code_RESOURCE_EXHAUSTED;
    case FARANDOLE_UNIMPLEMENTED:
      return XLA_FFI_Error_Code_UNIMPLEMENTED;
    case FARANDOLE_INTERNAL:
      return XLA_FFI_Error_Code_INTERNAL;
    default:
      return XLA_FFI_Error_Code_ABORTED;
  }
}

int64_t BytesOf(const XLA_FFI_Buffer& buffer, int64_t element_bytes) {
  int64_t bytes = element_bytes;
  for (int64_t i = 0; i < buffer.rank; ++i) bytes *= buffer.dims[i];
  return bytes;
}

/// Copies the value of the attribute `index`, if it has this name and type.
template <class Value>
bool ReadScalar(const XLA_FFI_Attrs& given, int64_t index, std::string_view name,
                XLA_FFI_DataType type, Value* value) {
  const XLA_FFI_ByteSpan& found = *given.names[index];
  if (std::string_view(found.ptr, found.len) != name) return false;
  if (given.types[index] != XLA_FFI_AttrType_SCALAR) return false;
  const auto& scalar = *static_cast<const XLA_FFI_Scalar*>(given.attrs[index]);
  if (scalar.dtype != type) return false;
  std::memcpy(value, scalar.value, sizeof(Value));
  return true;
}

bool ReadText(const XLA_FFI_Attrs& given, int64_t index, std::string_view name,
              std::string* value) {
  const XLA_FFI_ByteSpan& found = *given.names[index];
  if (std::string_view(found.ptr, found.len) != name) return false;
  if (given.types[index] != XLA_FFI_AttrType_STRING) return false;
  const auto& text = *static_cast<const XLA_FFI_ByteSpan*>(given.attrs[index]);
  value->assign(text.ptr, text.len);
  return true;
}

const XLA_FFI_Buffer& Operand(const XLA_FFI_CallFrame& frame, int64_t index) {
  return *static_cast<const XLA_FFI_Buffer*>(frame.args.args[index]);
}

const XLA_FFI_Buffer& ResultOf(const XLA_FFI_CallFrame& frame, int64_t index) {
  return *static_cast<const XLA_FFI_Buffer*>(frame.rets.rets[index]);
}

}  // namespace

XLA_FFI_Error* MakeError(const XLA_FFI_Api* api, int code, const std::string& message) {
  const std::string text = "farandole: " + message;  // which farandole.jax.errors looks for
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, text.c_str(),
                                 CodeOf(code)};
  return api->XLA_FFI_Error_Create(&args);
}

int64_t RunIdOf(const XLA_FFI_CallFrame& frame) {
  XLA_FFI_RunId_Get_Args args{XLA_FFI_RunId_Get_Args_STRUCT_SIZE, nullptr, frame.ctx, 0};
  XLA_FFI_Error* const error = frame.api->XLA_FFI_RunId_Get(&args);
  if (error == nullptr) return args.run_id;
  XLA_FFI_Error_Destroy_Args destroyed{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
  frame.api->XLA_FFI_Error_Destroy(&destroyed);
  return 0;
}

bool AnswerMetadata(const XLA_FFI_CallFrame& frame) {
  const auto* extension = frame.extension_start;  // version 0.5 renames its type
  if (extension == nullptr || extension->type != XLA_FFI_Extension_Metadata) return false;
  const auto& question = *reinterpret_cast<const XLA_FFI_Metadata_Extension*>(extension);
  question.metadata->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, kApiMajor, kApiMinor};
  question.metadata->traits = 0;
  return true;
}

bool Read(const XLA_FFI_Attrs& given, Attributes* attributes) {
  constexpr auto kInteger = XLA_FFI_DataType_S64;
  constexpr auto kReal = XLA_FFI_DataType_F64;
  return given.size == 12 && ReadScalar(given, 0, "devices", kInteger, &attributes->devices) &&
         ReadScalar(given, 1, "kind", kInteger, &attributes->kind) &&
         ReadText(given, 2, "name", &attributes->name) &&
         ReadScalar(given, 3, "number", kInteger, &attributes->number) &&
         ReadScalar(given, 4, "op", kInteger, &attributes->op) &&
         ReadScalar(given, 5, "postscale", kReal, &attributes->postscale) &&
         ReadScalar(given, 6, "prescale", kReal, &attributes->prescale) &&
         ReadScalar(given, 7, "rank", kInteger, &attributes->rank) &&
         ReadScalar(given, 8, "root", kInteger, &attributes->root) &&
         ReadScalar(given, 9, "set", kInteger, &attributes->set) &&
         ReadScalar(given, 10, "size", kInteger, &attributes->size) &&
         ReadScalar(given, 11, "wire", kInteger, &attributes->wire);
}

const char* Read(const XLA_FFI_CallFrame& frame, bool has_device, Arrays* arrays) {
  const int64_t count = frame.args.size - 1 - (has_device ? 1 : 0);
  const int64_t results = frame.rets.size - 1;
  if (count < 0 || (results != count && results != 0))
    return "another number of operands than results";
  for (int64_t i = 0; i < results; ++i) {
    const XLA_FFI_Buffer& given = Operand(frame, i);
    const XLA_FFI_Buffer& result = ResultOf(frame, i);
    const Element element = ElementOf(given.dtype);
    if (element.dtype < 0) return "an array of a dtype that cannot be moved";
    if (result.dtype != given.dtype) return "a result of another dtype than its array";
    arrays->tensors.push_back(
        {nullptr, element.dtype, static_cast<int32_t>(given.rank), given.dims});
    arrays->in.push_back(given.data);
    arrays->out.push_back({result.data, BytesOf(result, element.size_bytes), nullptr});
    arrays->rows.push_back(result.rank > 0 ? result.dims[0] : 0);
  }
  if (has_device) std::memcpy(&arrays->device, Operand(frame, count + 1).data, sizeof(uint32_t));
  return nullptr;
}

}  // namespace farandole::xla
