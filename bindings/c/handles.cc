#include "bindings/c/handles.h"

#include <cmath>
#include <cstddef>

namespace farandole {
namespace {

// For each thread: a failure in another one does not replace the text between a call and its
// farandole_last_error.
thread_local Status last_failure;

/// Whether the caller's struct, perhaps of an earlier version, is long enough to have the field.
template <class Field>
bool HasField(const farandole_params& params, Field farandole_params::*field) {
  const auto* const begin = reinterpret_cast<const char*>(&params);
  const auto* const end = reinterpret_cast<const char*>(&(params.*field) + 1);
  return params.struct_size >= static_cast<size_t>(end - begin);
}

}  // namespace

int Report(const Status& status) {
  if (!status.ok()) last_failure = status;
  return static_cast<int>(status.code());
}

int Report(const Engine& engine, const Status& status) {
  if (status.ok()) return FARANDOLE_OK;
  const Generation::Explained explained = Generation::Of(engine).Explain(status);
  const int code = Report(explained.status);
  return explained.is_of_the_past ? FARANDOLE_GENERATION_ENDED : code;
}

int ReportNull(const char* what) {
  return Report(InvalidArgument(std::string(what) + " must not be NULL"));
}

namespace {

constexpr uint32_t kUidBits = 24;  // sets in a generation; the rest numbers these, modulo 256

uint32_t SpaceOfSets(const Generation& generation) {
  return static_cast<uint32_t>(generation.number() - 1) << kUidBits;
}

}  // namespace

uint32_t ToSetHandle(const Generation& generation, uint32_t uid) {
  return uid == kGlobalSet ? kGlobalSet : SpaceOfSets(generation) + uid;
}

int FromSetHandle(const Generation& generation, uint32_t set, uint32_t* uid) {
  if (set >> kUidBits >= World::Get().generations())
    return Report(InvalidArgument("process set " + std::to_string(set) + " is unknown"));
  *uid = set == kGlobalSet ? kGlobalSet : set - SpaceOfSets(generation);
  if (*uid < uint32_t{1} << kUidBits) return FARANDOLE_OK;
  (void)Report(Aborted("a process set of another generation of this process; this is generation " +
                       std::to_string(generation.number()) +
                       ", to which process sets have to be added again"));
  return FARANDOLE_GENERATION_ENDED;
}

// Without memory for the text the code alone is left, and the last error is the one before.
int ReportException() noexcept try { return Report(FromException()); } catch (...) {
  return FARANDOLE_RESOURCE_EXHAUSTED;
}

int64_t TimeoutNs(double timeout_s) {
  // Written so that NaN means no limit, too. Long times are cut, because the product has to fit
  // into 64 bits, also when a caller adds the clock's time to it.
  if (!(timeout_s >= 0)) return -1;
  constexpr double kLongest = 1e9;  // seconds; more than 30 years
  return static_cast<int64_t>(std::fmin(timeout_s, kLongest) * static_cast<double>(kNsPerSecond));
}

/// The failed work's message becomes the last error of the thread that waits, which need not be the
/// one that started it.
int WaitFor(Engine& engine, const Work& work, double timeout_s) {
  if (!engine.Wait(work, TimeoutNs(timeout_s))) return FARANDOLE_PENDING;
  return Report(engine, work.status());
}

Status CheckStruct(const char* type, size_t struct_size, size_t expected) {
  if (struct_size >= expected) return {};
  return InvalidArgument(std::string(type) + ".struct_size is " + std::to_string(struct_size) +
                         "; expected sizeof(" + type + ") = " + std::to_string(expected));
}

Status CheckAllocator(const farandole_allocator& allocator) {
  FARANDOLE_RETURN_IF_ERROR(FARANDOLE_CHECK_STRUCT(farandole_allocator, allocator));
  if (allocator.allocate != nullptr) return {};
  return InvalidArgument("farandole_allocator.allocate is NULL; expected a function");
}

Result<ProducerStream> ToStream(const farandole_stream* stream) {
  if (stream == nullptr) return InvalidArgument("stream must not be NULL");
  FARANDOLE_RETURN_IF_ERROR(FARANDOLE_CHECK_STRUCT(farandole_stream, *stream));
  return ProducerStream{stream->device, stream->stream};
}

Result<Signature> ToSignature(const farandole_params& params) {
  const size_t least = offsetof(farandole_params, device);  // the first version ended there
  if (params.struct_size < least) {
    return InvalidArgument(
        "farandole_params.struct_size is " + std::to_string(params.struct_size) +
        "; expected sizeof(farandole_params) = " + std::to_string(sizeof(farandole_params)));
  }
  const int32_t device =
      HasField(params, &farandole_params::device) ? params.device : FARANDOLE_CPU;
  // Kinds after the barrier have functions of their own and must not be reached from here.
  FARANDOLE_RETURN_IF_ERROR(CheckRange("collective kind", params.kind, FARANDOLE_BARRIER));
  // Ranks must agree on the root. Elsewhere than in a broadcast it has no meaning, so what stands
  // there cannot make them differ.
  const int32_t root = params.kind == FARANDOLE_BROADCAST ? params.root : -1;
  const Result<Collective> collective = ToCollective(
      {params.kind, params.op, params.wire, device, root, params.prescale, params.postscale});
  if (!collective.ok()) return collective.status();
  Signature signature;
  static_cast<Collective&>(signature) = collective.value();
  if (HasField(params, &farandole_params::function) && params.function != nullptr)
    signature.function = params.function;
  return signature;
}

Result<std::vector<int64_t>> ToSplits(const farandole_params& params, const Engine& engine,
                                      uint32_t uid, size_t tensors) {
  if (!HasField(params, &farandole_params::splits) || params.splits == nullptr)
    return std::vector<int64_t>();
  if (params.kind != FARANDOLE_ALLTOALL) {
    return InvalidArgument(std::string(Name(static_cast<OpKind>(params.kind))) +
                           " takes no farandole_params.splits; expected NULL");
  }
  const Result<ProcessSetInfo> set = engine.operations().FindSet(uid);
  if (!set.ok()) return set.status();
  // C passes no length: for each tensor there have to be as many as the set has ranks.
  return std::vector<int64_t>(params.splits, params.splits + tensors * set.value().ranks.size());
}

Result<std::vector<TensorSignature>> ToTensorSignatures(const farandole_tensor* tensors,
                                                        int32_t count) {
  if (count < 0 || (count > 0 && tensors == nullptr)) {
    return InvalidArgument("a group of " + std::to_string(count) +
                           " tensors; expected at least 0 and a pointer to them");
  }
  std::vector<TensorSignature> signatures;
  for (int32_t i = 0; i < count; ++i) {
    const farandole_tensor& tensor = tensors[i];
    FARANDOLE_RETURN_IF_ERROR(CheckRange("dtype", tensor.dtype, kDTypeCount - 1));
    // Before `shape` is read, of which this is the length.
    FARANDOLE_RETURN_IF_ERROR(CheckRange("number of dimensions", tensor.ndim, 64));
    if (tensor.ndim > 0 && tensor.shape == nullptr)
      return InvalidArgument("shape must not be NULL");
    TensorSignature& signature = signatures.emplace_back();
    signature.name = tensor.name == nullptr ? "" : tensor.name;
    signature.dtype = static_cast<DType>(tensor.dtype);
    signature.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  }
  return signatures;
}

}  // namespace farandole

const char* farandole_last_error(void) { return farandole::last_failure.message().c_str(); }

int farandole_last_failure(farandole_failure* out) {
  const farandole::FailureFacts& facts = farandole::last_failure.facts();
  if (out == nullptr) return farandole::ReportNull("out");
  const farandole::Status checked = FARANDOLE_CHECK_STRUCT(farandole_failure, *out);
  if (!checked.ok()) return farandole::Report(checked);
  out->ranks = facts.ranks.data();
  out->rank_count = static_cast<int32_t>(facts.ranks.size());
  out->cause = facts.cause.empty() ? nullptr : facts.cause.c_str();
  out->tensor = facts.tensor.empty() ? nullptr : facts.tensor.c_str();
  out->kind = static_cast<int32_t>(facts.kind);
  out->number = facts.number;
  out->pid = facts.pid;
  out->host = facts.host.empty() ? nullptr : facts.host.c_str();
  out->last = facts.last.empty() ? nullptr : facts.last.c_str();
  out->last_age_s = facts.last_age_ns < 0 ? -1 : static_cast<double>(facts.last_age_ns) / 1e9;
  return FARANDOLE_OK;
}
