#include "ops/cuda/set_up.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

namespace farandole {
namespace {

/// Member 0's answer: the id, or why there is none.
struct WrittenId {
  int32_t code;
  int32_t size;
  char text[1016];
};

}  // namespace

WaySetUp::WaySetUp(HostSet* host, const RankCard& mine, NcclSource& nccl, bool wants_id)
    : host_(host), mine_(mine), nccl_(nccl), wants_id_(wants_id) {}

WaySetUp::~WaySetUp() { Abandon(); }

Progress WaySetUp::Step() {
  if (operation_ != nullptr) {
    const Progress progress = operation_->Step();
    if (progress.state == Progress::State::kFailed) operation_ = nullptr;
    if (progress.state != Progress::State::kDone) return progress;
    operation_ = nullptr;
  }
  if (Status status = Advance(); !status.ok()) return Progress::Failed(std::move(status));
  return stage_ == Stage::kDone ? Progress::Done() : Progress::Moved();
}

void WaySetUp::Abandon() {
  if (operation_ != nullptr) operation_->Abandon();
  operation_ = nullptr;
}

Status WaySetUp::Advance() {
  switch (stage_) {
    case Stage::kBegin:
      stage_ = Stage::kCards;
      return TellCards();
    case Stage::kCards: {
      FARANDOLE_RETURN_IF_ERROR(Judge());
      const bool nccl =
          choice_.way == WayChoice::Way::kNccl || choice_.way == WayChoice::Way::kNcclShared;
      const bool tells_id = nccl && wants_id_;
      stage_ = tells_id ? Stage::kId : Stage::kDone;
      return tells_id ? TellId() : Status();
    }
    case Stage::kId:
      stage_ = Stage::kDone;
      return ReadId();
    case Stage::kDone:
      return {};
  }
  return {};
}

// Every member fills its own place among zeros; the maximum is what all of them wrote.
Status WaySetUp::TellCards() {
  const size_t size = host_ == nullptr ? 1 : static_cast<size_t>(host_->size());
  const size_t index = host_ == nullptr ? 0 : static_cast<size_t>(host_->my_index());
  bytes_.assign(size * kCardBytes, std::byte{0});
  WriteCard(mine_, std::span(bytes_).subspan(index * kCardBytes, kCardBytes));
  return host_ == nullptr ? Status() : StartExchange(OpKind::kAllreduce);
}

Status WaySetUp::StartExchange(OpKind kind) {
  segment_ = {bytes_.data(), bytes_.data(), static_cast<int64_t>(bytes_.size())};
  batch_ = Batch();
  batch_.kind = kind;
  batch_.dtype = DType::kUint8;
  batch_.wire = DType::kUint8;
  batch_.op = ReduceOp::kMax;
  batch_.segments = {&segment_, 1};
  batch_.count = segment_.count;
  Result<PlaneOperation*> started = host_->Start(batch_);
  if (started.ok()) operation_ = started.value();
  return started.status();
}

Status WaySetUp::Judge() {
  for (size_t at = 0; at < bytes_.size(); at += kCardBytes) {
    Result<RankCard> card = ReadCard(std::span(bytes_).subspan(at, kCardBytes));
    if (!card.ok()) return card.status();
    cards_.push_back(std::move(card).value());
  }
  Result<WayChoice> choice = ChooseWay(cards_);
  if (choice.ok()) choice_ = choice.value();
  return choice.status();
}

Status WaySetUp::TellId() {
  if (choice_.way == WayChoice::Way::kNcclShared) nccl_.AllowSharedGpus();
  WrittenId written{};
  if (host_->my_index() == 0) {
    const Result<std::string> id = nccl_.MakeUniqueId();
    const std::string text = id.ok() ? id.value() : id.status().message();
    written.code = static_cast<int32_t>(id.status().code());
    written.size = static_cast<int32_t>(std::min(text.size(), sizeof written.text));
    std::memcpy(written.text, text.data(), static_cast<size_t>(written.size));
  }
  bytes_.resize(sizeof written);
  std::memcpy(bytes_.data(), &written, sizeof written);
  return StartExchange(OpKind::kBroadcast);
}

Status WaySetUp::ReadId() {
  WrittenId written;
  std::memcpy(&written, bytes_.data(), sizeof written);
  std::string text(written.text, static_cast<size_t>(written.size));
  if (written.code == static_cast<int32_t>(Code::kOk)) {
    unique_id_ = std::move(text);
    return {};
  }
  return {static_cast<Code>(written.code), "rank " + std::to_string(cards_.front().rank) +
                                               " (host " + cards_.front().HostName() +
                                               ") could not begin NCCL's set-up: " + text};
}

}  // namespace farandole
