// The C ABI's process sets.
#include <utility>
#include <vector>

#include "bindings/c/handles.h"

using farandole::Engine;
using farandole::Report;
using farandole::ReportException;
using farandole::ReportNull;
using farandole::Result;

namespace {

// Adding and removing take a round of all ranks, so C gets a work to wait for. Only when it has
// finished does farandole_set_find know the set, under a uid that all ranks have agreed on.
int Give(Engine& engine, Result<std::shared_ptr<farandole::Work>> started, farandole_work** work) {
  if (!started.ok()) return Report(engine, started.status());
  *work = new farandole_work{std::move(started).value(), &engine};
  return FARANDOLE_OK;
}

// Checks what only C can get wrong. The engine compares the ranks with the job and sorts them.
Result<std::vector<int32_t>> ToRanks(const int32_t* ranks, int32_t count) {
  if (ranks != nullptr && count > 0) return std::vector<int32_t>(ranks, ranks + count);
  return farandole::InvalidArgument("a process set of " + std::to_string(count) +
                                    " ranks; expected at least 1 and a pointer to them");
}

}  // namespace

int farandole_set_add(farandole_context* context, const int32_t* ranks, int32_t count,
                      farandole_work** work) try {
  if (context == nullptr || work == nullptr) return ReportNull("context or work");
  Result<std::vector<int32_t>> members = ToRanks(ranks, count);
  if (!members.ok()) return Report(members.status());
  Engine& engine = context->generation->engine();
  return Give(engine, engine.AddSet(members.value()), work);
} catch (...) {
  return ReportException();
}

int farandole_set_find(const farandole_context* context, const int32_t* ranks, int32_t count,
                       uint32_t* uid) try {
  if (context == nullptr || uid == nullptr) return ReportNull("context or uid");
  Result<std::vector<int32_t>> members = ToRanks(ranks, count);
  if (!members.ok()) return Report(members.status());
  const Engine& engine = context->generation->engine();
  Result<farandole::ProcessSetInfo> set = engine.operations().SetOf(members.value());
  if (!set.ok()) return Report(engine, set.status());
  *uid = farandole::ToSetHandle(*context->generation, set.value().uid);
  return FARANDOLE_OK;
} catch (...) {
  return ReportException();
}

int farandole_set_remove(farandole_context* context, uint32_t uid, farandole_work** work) try {
  if (context == nullptr || work == nullptr) return ReportNull("context or work");
  if (const int code = farandole::FromSetHandle(*context->generation, uid, &uid)) return code;
  Engine& engine = context->generation->engine();
  return Give(engine, engine.RemoveSet(uid), work);
} catch (...) {
  return ReportException();
}
