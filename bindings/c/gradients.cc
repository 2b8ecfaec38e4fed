// The C ABI's functions for the gradients of one optimizer.
#include <string>
#include <utility>

#include "bindings/c/handles.h"

using farandole::GradientRound;
using farandole::Report;
using farandole::ReportException;
using farandole::ReportNull;
using farandole::Result;
using farandole::Status;

namespace {

/// What the gradients of no context refuse.
Status CheckBound(const GradientRound& round) {
  if (round.is_bound()) return {};
  return farandole::Aborted("these gradients are of no context: farandole_gradients_rebind first");
}

/// What most functions are: one call of the round. @param call  Gives a Status.
template <class Call>
int Run(farandole_gradients* gradients, Call call) try {
  if (gradients == nullptr) return ReportNull("gradients");
  if (Status bound = CheckBound(gradients->round); !bound.ok()) return Report(bound);
  return Report(*gradients->engine, call(gradients->round));
} catch (...) {
  return ReportException();
}

/// A call that waits: PENDING where `call(timeout_ns, &outcome)` gives false.
template <class Call>
int RunWaiting(farandole_gradients* gradients, double timeout_s, Call call) try {
  if (gradients == nullptr) return ReportNull("gradients");
  Status outcome = CheckBound(gradients->round);
  if (!outcome.ok()) return Report(outcome);
  if (!call(gradients->round, farandole::TimeoutNs(timeout_s), &outcome)) return FARANDOLE_PENDING;
  return Report(*gradients->engine, outcome);
} catch (...) {
  return ReportException();
}

Status CheckOptions(const farandole_gradient_options& options) {
  FARANDOLE_RETURN_IF_ERROR(FARANDOLE_CHECK_STRUCT(farandole_gradient_options, options));
  if (options.allocator == nullptr) return {};
  return farandole::CheckAllocator(*options.allocator);
}

Result<GradientRound::Options> ToOptions(const farandole_params& params,
                                         const farandole_gradient_options& options,
                                         const farandole::Config& config) {
  if (params.kind != FARANDOLE_ALLREDUCE) {
    return farandole::InvalidArgument("gradients of kind " + std::to_string(params.kind) +
                                      "; expected FARANDOLE_ALLREDUCE");
  }
  Result<farandole::Signature> common = farandole::ToSignature(params);
  if (!common.ok()) return common.status();
  GradientRound::Options round;
  round.common = std::move(common).value();
  if (options.prefix != nullptr) round.prefix = options.prefix;
  round.group_bytes = options.group_bytes > 0 ? options.group_bytes : config.group_bytes;
  round.overlaps = options.is_late == 0;
  round.has_flag = options.has_flag != 0;
  return round;
}

/// The first optimizer of all ranks, as the file has one size. On an 8-bit wire other groups would
/// be other sums: they lose the residuals of those before them.
bool IsTuned(farandole::Generation& generation, const farandole_gradient_options& options,
             int32_t wire, uint32_t set) {
  return generation.config().autotune && options.group_bytes == 0 && options.prefix == nullptr &&
         wire != FARANDOLE_WIRE_INT8 && set == farandole::kGlobalSet &&
         generation.wraps().count(set) == 0;
}

std::vector<std::string> ToLabels(const char* const* labels, int32_t count) {
  if (labels == nullptr) return {};
  return {labels, labels + count};
}

}  // namespace

// Copies all that it is given: names, shapes, labels and parameters may go after the call.
int farandole_gradients_create(farandole_context* context, const farandole_params* params,
                               const farandole_gradient_options* options,
                               const farandole_tensor* tensors, int32_t count,
                               farandole_gradients** out) try {
  if (context == nullptr || params == nullptr || out == nullptr)
    return ReportNull("context, params or out");
  const farandole_gradient_options defaults{sizeof defaults, nullptr, nullptr, 0, 0, 0, 0, nullptr};
  if (options == nullptr) options = &defaults;
  if (const Status checked = CheckOptions(*options); !checked.ok()) return Report(checked);
  uint32_t uid = 0;
  if (const int code = farandole::FromSetHandle(*context->generation, params->set, &uid))
    return code;
  Result<GradientRound::Options> round =
      ToOptions(*params, *options, context->generation->config());
  if (!round.ok()) return Report(round.status());
  round.value().set = uid;
  if (IsTuned(*context->generation, *options, params->wire, uid)) {
    round.value().tuner.emplace(round.value().group_bytes);
    round.value().tuning_file = context->generation->config().autotune_log;
  }
  Result<std::vector<farandole::TensorSignature>> signatures =
      farandole::ToTensorSignatures(tensors, count);
  if (!signatures.ok()) return Report(signatures.status());
  std::vector<std::string> labels = ToLabels(options->labels, options->label_count);
  auto library = std::make_shared<farandole::LibraryResults>(nullptr);
  std::shared_ptr<farandole::ResultAllocator> results = library;
  if (options->allocator != nullptr)
    results = std::make_shared<farandole::CallbackResults>(*options->allocator);
  farandole::Generation& generation = *context->generation;
  *out = new farandole_gradients{
      &generation.engine(),
      GradientRound(generation.engine(), std::move(round).value(), std::move(signatures).value(),
                    std::move(labels), &generation.wraps(), results),
      std::move(library)};
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

// The engine of the context that it leaves must still live: the groups' operations are its.
int farandole_gradients_rebind(farandole_gradients* gradients, farandole_context* context,
                               uint32_t set, const char* const* labels, int32_t count) try {
  if (gradients == nullptr) return ReportNull("gradients");
  if (const Status left = gradients->round.Unbind(); !left.ok()) return Report(left);
  gradients->engine = {};
  if (context == nullptr) return FARANDOLE_OK;
  if (const int code = farandole::FromSetHandle(*context->generation, set, &set)) return code;
  farandole::Generation& generation = *context->generation;
  gradients->engine = &generation.engine();
  return Report(gradients->round.Rebind(generation.engine(), &generation.wraps(), set,
                                        ToLabels(labels, count)));
} catch (...) {
  return ReportException();
}

int farandole_gradients_redefine(farandole_gradients* gradients, const farandole_tensor* tensors,
                                 int32_t count, int32_t device) {
  return Run(gradients, [&](GradientRound& round) {
    if (device < 0 || device > FARANDOLE_CUDA) {
      return farandole::InvalidArgument("device is " + std::to_string(device) +
                                        "; expected a farandole_device");
    }
    auto signatures = farandole::ToTensorSignatures(tensors, count);
    if (!signatures.ok()) return signatures.status();
    return round.Redefine(std::move(signatures).value(),
                          static_cast<farandole::DeviceKind>(device));
  });
}

int farandole_gradients_add(farandole_gradients* gradients, const farandole_tensor* tensors,
                            int32_t count) {
  return Run(gradients, [&](GradientRound& round) {
    auto signatures = farandole::ToTensorSignatures(tensors, count);
    return signatures.ok() ? round.Add(std::move(signatures).value()) : signatures.status();
  });
}

int farandole_gradients_count_pass(farandole_gradients* gradients, int32_t no_sync) {
  return Run(gradients, [&](GradientRound& round) {
    round.CountPass(no_sync != 0);
    return Status();
  });
}

int farandole_gradients_set_passes(farandole_gradients* gradients, int32_t passes) {
  if (gradients == nullptr) return ReportNull("gradients");
  gradients->round.set_passes(passes);
  return FARANDOLE_OK;
}

int farandole_gradients_open(farandole_gradients* gradients) {
  return Run(gradients, [](GradientRound& round) { return round.Open(); });
}

int farandole_gradients_accumulated(farandole_gradients* gradients, int32_t i, int32_t* due) {
  return Run(gradients, [&](GradientRound& round) {
    if (due == nullptr) return farandole::InvalidArgument("due must not be NULL");
    FARANDOLE_RETURN_IF_ERROR(round.CheckNumber(i));
    const Result<int32_t> next = round.Accumulated(i);
    if (next.ok()) *due = next.value();
    return next.status();
  });
}

int32_t farandole_gradients_next(const farandole_gradients* gradients) {
  return gradients == nullptr ? -1 : gradients->round.NextUnmarked();
}

// Called from hooks in the middle of a backward pass: it starts the gradient's group if that is
// full, and waits for nothing. GradientVote has the numbers of farandole_vote.
int farandole_gradients_mark(farandole_gradients* gradients, int32_t i, const void* in, void* out,
                             int32_t vote, const farandole_stream* stream) {
  return Run(gradients, [&](GradientRound& round) {
    if (vote < FARANDOLE_PRESENT || vote > FARANDOLE_CLEAN) {
      return farandole::InvalidArgument("vote is " + std::to_string(vote) + "; expected 0 to 2");
    }
    const auto cast = static_cast<farandole::GradientVote>(vote);
    if (stream == nullptr) return round.Mark(i, in, out, cast);
    const Result<farandole::ProducerStream> producer = farandole::ToStream(stream);
    if (!producer.ok()) return producer.status();
    if (in == nullptr) {  // a result in the library's memory would be on that GPU
      const Result<farandole::Device*> gpu = round.engine().GpuOf(producer.value());
      if (!gpu.ok()) return gpu.status();
      gradients->results->UseDevice(gpu.value());
    }
    return round.Mark(i, in, out, cast, &producer.value());
  });
}

int farandole_gradients_marked(const farandole_gradients* gradients, int32_t i) {
  return gradients != nullptr && gradients->round.Marked(i) ? 1 : 0;
}

int farandole_gradients_raise_flag(farandole_gradients* gradients) {
  return Run(gradients, [](GradientRound& round) {
    round.RaiseFlag();
    return Status();
  });
}

int farandole_gradients_compare(farandole_gradients* gradients, double timeout_s) {
  return RunWaiting(gradients, timeout_s, [](auto& round, int64_t timeout_ns, Status* outcome) {
    return round.Compare(timeout_ns, outcome);
  });
}

int farandole_gradients_end(farandole_gradients* gradients, const char* failed) {
  return Run(gradients,
             [&](GradientRound& round) { return round.End(failed == nullptr ? "" : failed); });
}

// Waits on the host until the round is launched, on the stream until it is complete.
int farandole_gradients_wait(farandole_gradients* gradients, const farandole_stream* stream,
                             double timeout_s) {
  return RunWaiting(gradients, timeout_s, [&](auto& round, int64_t timeout_ns, Status* outcome) {
    if (!round.Wait(timeout_ns, outcome)) return false;
    if (stream == nullptr || !outcome->ok()) return true;
    const Result<farandole::ProducerStream> waiting = farandole::ToStream(stream);
    *outcome = waiting.ok() ? round.MakeWait(waiting.value()) : waiting.status();
    return true;
  });
}

int farandole_gradients_stepped(farandole_gradients* gradients) {
  return Run(gradients, [](GradientRound& round) { return round.Stepped(); });
}

int farandole_gradients_note_failure(farandole_gradients* gradients, const char* why) {
  return Run(gradients, [&](GradientRound& round) {
    round.NoteFailure(why == nullptr ? "" : why);
    return Status();
  });
}

int farandole_gradients_forget(farandole_gradients* gradients) {
  if (gradients == nullptr) return ReportNull("gradients");
  gradients->round.Forget();
  return FARANDOLE_OK;
}

// Of gradients without a context too: counts and the failure are the optimizer's.
int farandole_gradients_status(const farandole_gradients* gradients,
                               farandole_round_status* status) try {
  if (gradients == nullptr || status == nullptr) return ReportNull("gradients or status");
  if (const Status checked = FARANDOLE_CHECK_STRUCT(farandole_round_status, *status); !checked.ok())
    return Report(checked);
  const GradientRound& round = gradients->round;
  status->is_open = round.is_open();
  status->is_pending = round.is_pending();
  status->is_window_full = round.is_window_full();
  status->has_window = round.has_window();
  status->has_marked = round.has_marked();
  status->has_unreduced = round.has_unreduced();
  status->flag = round.flag();
  status->groups = round.group_count();
  status->number = round.number();
  status->rounds = round.rounds();
  status->succeeded = round.succeeded();
  status->failure = round.failure().empty() ? nullptr : round.failure().c_str();
  status->is_interrupted = round.is_interrupted();
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

// It looks at all rounds and not only the last: a loop that never waits for the GPU has several
// whose memory is in use.
int farandole_gradients_complete(farandole_gradients* gradients, int64_t* rounds) {
  return Run(gradients, [&](GradientRound& round) {
    if (rounds == nullptr) return farandole::InvalidArgument("rounds must not be NULL");
    const Result<int64_t> complete = round.CompletedRounds();
    if (complete.ok()) *rounds = complete.value();
    return complete.status();
  });
}

int farandole_gradients_skipped(const farandole_gradients* gradients, int32_t i) {
  return gradients != nullptr && gradients->round.Skipped(i) ? 1 : 0;
}

int farandole_gradients_take_result(farandole_gradients* gradients, int32_t i,
                                    farandole_buffer** result) {
  return Run(gradients, [&](GradientRound& round) {
    if (result == nullptr) return farandole::InvalidArgument("result must not be NULL");
    FARANDOLE_RETURN_IF_ERROR(round.CheckNumber(i));
    *result = gradients->results->Take(static_cast<size_t>(i)).release();
    if (*result != nullptr) return Status();
    return farandole::InvalidArgument("gradient " + std::to_string(i) +
                                      " has no result in the library's memory");
  });
}

void farandole_gradients_release(farandole_gradients* gradients) {
  // A round in flight still reads this object's memory; it is given up rather than freed below the
  // engine.
  if (gradients != nullptr && !gradients->round.InFlight()) delete gradients;
}
