// The C ABI's functions for the gradients of one optimizer.
#include <string>
#include <utility>

#include "bindings/c/handles.h"

using farandole::Report;
using farandole::ReportException;
using farandole::ReportNull;
using farandole::Result;
using farandole::Status;

// Copies all that it is given: names, shapes and parameters may go after the call.
int farandole_gradients_create(farandole_context* context, const farandole_params* params,
                               const char* prefix, const farandole_tensor* tensors, int32_t count,
                               int64_t group_bytes, farandole_gradients** out) try {
  if (context == nullptr || params == nullptr || prefix == nullptr || out == nullptr) {
    return ReportNull("context, params, prefix or out");
  }
  if (params->kind != FARANDOLE_ALLREDUCE) {
    return Report(farandole::InvalidArgument("gradients of kind " + std::to_string(params->kind) +
                                             "; expected FARANDOLE_ALLREDUCE"));
  }
  Result<farandole::Signature> common = farandole::ToSignature(*params);
  if (!common.ok()) return Report(common.status());
  Result<std::vector<farandole::TensorSignature>> signatures =
      farandole::ToTensorSignatures(tensors, count);
  if (!signatures.ok()) return Report(signatures.status());
  farandole::GradientBuckets::Options options;
  options.set = params->set;
  options.common = std::move(common).value();
  options.prefix = prefix;
  options.group_bytes = group_bytes > 0 ? group_bytes : context->context->config().group_bytes;
  *out = new farandole_gradients{farandole::GradientBuckets(
      context->context->engine(), std::move(options), std::move(signatures).value())};
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

int farandole_gradients_redefine(farandole_gradients* gradients, const farandole_tensor* tensors,
                                 int32_t count) try {
  if (gradients == nullptr) return ReportNull("gradients");
  Result<std::vector<farandole::TensorSignature>> signatures =
      farandole::ToTensorSignatures(tensors, count);
  if (!signatures.ok()) return Report(signatures.status());
  return Report(gradients->gradients.Redefine(std::move(signatures).value()));
} catch (...) {
  return ReportException();
}

namespace {

// Called from hooks in the middle of a backward pass: it starts the gradient's group if that is
// full, and waits for nothing. GradientVote has the numbers of farandole_vote.
int Mark(farandole_gradients* gradients, int32_t i, const void* in, void* out, int32_t vote,
         const farandole::ProducerStream* producer) {
  if (gradients == nullptr) return ReportNull("gradients");
  if (vote < FARANDOLE_PRESENT || vote > FARANDOLE_CLEAN) {
    return Report(
        farandole::InvalidArgument("vote is " + std::to_string(vote) + "; expected 0 to 2"));
  }
  return Report(
      gradients->gradients.Mark(i, in, out, static_cast<farandole::GradientVote>(vote), producer));
}

}  // namespace

int farandole_gradients_mark(farandole_gradients* gradients, int32_t i, const void* in, void* out,
                             int32_t vote) try {
  return Mark(gradients, i, in, out, vote, nullptr);
} catch (...) {
  return ReportException();
}

int farandole_gradients_mark_on(farandole_gradients* gradients, int32_t i, const void* in,
                                void* out, int32_t vote, const farandole_stream* stream) try {
  Result<farandole::ProducerStream> producer = farandole::ToStream(stream);
  if (!producer.ok()) return Report(producer.status());
  return Mark(gradients, i, in, out, vote, &producer.value());
} catch (...) {
  return ReportException();
}

int farandole_gradients_in_step(farandole_gradients* gradients, const farandole_step* step) try {
  if (gradients == nullptr || step == nullptr) return ReportNull("gradients or step");
  if (step->struct_size < sizeof(farandole_step)) {
    return Report(farandole::InvalidArgument(
        "farandole_step.struct_size is " + std::to_string(step->struct_size) +
        "; expected sizeof(farandole_step) = " + std::to_string(sizeof(farandole_step))));
  }
  const bool negative = step->passes < 0 || step->no_sync_passes < 0 || step->previous_passes < 0 ||
                        step->previous_no_sync_passes < 0;
  if (step->step < 1 || negative) {
    return Report(farandole::InvalidArgument(
        "farandole_step with step " + std::to_string(step->step) + " and " +
        std::to_string(step->passes) +
        " passes; expected a step from 1 on and no negative number of passes"));
  }
  // Kept for all rounds until the next call; each vote of a gradient carries it to rank 0.
  gradients->gradients.InStep({step->step, step->passes, step->no_sync_passes,
                               step->previous_passes, step->previous_no_sync_passes});
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

int farandole_gradients_announce_step(farandole_gradients* gradients) try {
  if (gradients == nullptr) return ReportNull("gradients");
  return Report(gradients->gradients.AnnounceStep());
} catch (...) {
  return ReportException();
}

int farandole_gradients_marked(const farandole_gradients* gradients, int32_t i) {
  return gradients != nullptr && gradients->gradients.Marked(i) ? 1 : 0;
}

int farandole_gradients_end(farandole_gradients* gradients, const char* failed) try {
  if (gradients == nullptr) return ReportNull("gradients");
  return Report(gradients->gradients.End(failed == nullptr ? "" : failed));
} catch (...) {
  return ReportException();
}

int farandole_gradients_wait(farandole_gradients* gradients, double timeout_s) try {
  if (gradients == nullptr) return ReportNull("gradients");
  Status outcome;
  if (!gradients->gradients.Wait(farandole::TimeoutNs(timeout_s), &outcome))
    return FARANDOLE_PENDING;
  return Report(outcome);
} catch (...) {
  return ReportException();
}

int farandole_gradients_skipped(const farandole_gradients* gradients, int32_t i) try {
  return gradients != nullptr && gradients->gradients.Skipped(i) ? 1 : 0;
} catch (...) {
  return ReportException();
}

// Waits on the host until the round is launched, on the stream until it is complete.
int farandole_gradients_wait_on(farandole_gradients* gradients, const farandole_stream* stream,
                                double timeout_s) try {
  Result<farandole::ProducerStream> waiting = farandole::ToStream(stream);
  if (!waiting.ok()) return Report(waiting.status());
  const int code = farandole_gradients_wait(gradients, timeout_s);
  if (code != FARANDOLE_OK) return code;
  return Report(gradients->gradients.MakeWait(waiting.value()));
} catch (...) {
  return ReportException();
}

// Looks at all rounds and not only the last: a loop that never waits for the GPU has several whose
// memory is in use.
int farandole_gradients_is_complete(farandole_gradients* gradients) try {
  if (gradients == nullptr) return ReportNull("gradients");
  int64_t waited = 0;
  int64_t complete = 0;
  const int code = farandole_gradients_rounds(gradients, &waited, &complete);
  if (code != FARANDOLE_OK) return code;
  return complete == waited ? FARANDOLE_OK : FARANDOLE_PENDING;
} catch (...) {
  return ReportException();
}

int farandole_gradients_rounds(farandole_gradients* gradients, int64_t* waited,
                               int64_t* complete) try {
  if (gradients == nullptr || waited == nullptr || complete == nullptr)
    return ReportNull("gradients, waited or complete");
  Result<int64_t> counted = gradients->gradients.CompletedRounds();
  if (!counted.ok()) return Report(counted.status());
  *waited = gradients->gradients.rounds();
  *complete = counted.value();
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

int32_t farandole_gradients_groups(const farandole_gradients* gradients) {
  return gradients == nullptr ? 0 : gradients->gradients.group_count();
}

void farandole_gradients_release(farandole_gradients* gradients) {
  // A round in flight still reads this object's memory; it is given up rather than freed below the
  // engine.
  if (gradients != nullptr && !gradients->gradients.InFlight()) delete gradients;
}
