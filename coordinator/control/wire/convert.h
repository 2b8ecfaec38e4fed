// Between the message structs and Protocol Buffers: filling, and checked reading.
//
// Reading refuses what Submit would refuse (coordinator/protocol/limits.h) and lists longer than
// the limits below. Thread safety: pure functions.
#pragma once

#include "coordinator/control/wire/bytes.h"
#include "coordinator/control/wire/farandole.pb.h"
#include "coordinator/protocol/messages.h"
#include "core/status.h"

namespace farandole {

void Fill(const UpMessage& message, wire::Votes& votes);
void Fill(const UpMessage& message, wire::Leave& leave);
void Fill(const UpMessage& message, wire::Stall& stall);
void Fill(const UpMessage& message, wire::Answers& answers);
void Fill(const UpMessage& message, wire::Waits& waits);
void Fill(const DownMessage& message, wire::Work& work);
void Fill(const DownMessage& message, wire::Notice& notice);

/// @return Internal naming the field and its limit. On failure the message's content is undefined.
Status Read(const wire::Votes& votes, UpMessage& message);
Status Read(const wire::Leave& leave, UpMessage& message);
Status Read(const wire::Stall& stall, UpMessage& message);
Status Read(const wire::Answers& answers, UpMessage& message);
Status Read(const wire::Waits& waits, UpMessage& message);
Status Read(const wire::Work& work, DownMessage& message);
Status Read(const wire::Notice& notice, DownMessage& message);

}  // namespace farandole
