#include "coordinator/job/member_messages.h"

#include <utility>
#include <vector>

#include "coordinator/control/gather_text.h"
#include "coordinator/control/wire/bytes.h"

namespace farandole {
namespace {

constexpr size_t kMostText = 4096;
constexpr size_t kMostLists = 1024;
constexpr size_t kMostMembers = 65'536;

struct MemberNumber {
  MemberId id = 0;
};
struct Report {
  MemberId id = 0;
  GenerationNumber accepted;
};

}  // namespace

template <class Archive>
void Fields(Archive& archive, Of<Archive, MemberNumber>& one) {
  archive.Number("member", one.id);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, Member>& member) {
  archive.Number("member", member.id);
  archive.Text("address", member.address, kMostText);
  archive.Text("host", member.host, kMostText);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, GenerationNumber>& generation) {
  archive.Number("generation", generation.number);
  archive.Number("proposer", generation.proposer);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, Report>& report) {
  archive.Number("member", report.id);
  Fields(archive, report.accepted);
}

namespace {

/// A set as a list, which a reader turns back.
template <class Archive>
void Members(Archive& archive, const char* field, Of<Archive, std::set<MemberId>>& ids) {
  std::vector<MemberNumber> list;
  for (const MemberId id : ids) list.push_back({id});
  archive.List(field, list, kMostMembers);
  if constexpr (Archive::kReads) {
    ids.clear();
    for (const MemberNumber one : list) ids.insert(one.id);
  }
}

template <class Archive>
void Reports(Archive& archive, Of<Archive, std::map<MemberId, GenerationNumber>>& reported) {
  std::vector<Report> list;
  for (const auto& [id, accepted] : reported) list.push_back({id, accepted});
  archive.List("reports", list, kMostMembers);
  if constexpr (Archive::kReads) {
    reported.clear();
    for (const Report& one : list) reported[one.id] = one.accepted;
  }
}

}  // namespace

template <class Archive>
void Fields(Archive& archive, Of<Archive, MemberList>& list) {
  Fields(archive, list.generation);
  archive.List("members", list.members, kMostMembers);
  archive.Text("root", list.root, kMostText);
  Members(archive, "members left out", list.left_out);
  Members(archive, "members without a vote", list.without_vote);
}

template <class Archive>
void Fields(Archive& archive, Of<Archive, MembershipMessage>& message) {
  archive.Enum("kind", message.kind, MembershipMessage::Kind::kGoneOn, 1);
  Fields(archive, message.sender);
  Fields(archive, message.started);
  archive.List("lists", message.pending, kMostLists);
  Fields(archive, message.accepted);
  Members(archive, "dead members", message.dead);
  Members(archive, "suspects", message.suspects);
  Fields(archive, message.proposal);
  Reports(archive, message.reported);
}

namespace {

template <class Message>
std::string Encode(const Message& message) {
  std::vector<std::byte> out;
  ByteWriter writer(out);
  Fields(writer, message);
  return TextOf(out);
}

template <class Message>
Result<Message> Decode(ByteSpan bytes) {
  ByteReader reader(bytes);
  Message message;
  Fields(reader, message);
  FARANDOLE_RETURN_IF_ERROR(reader.Finish());
  return message;
}

}  // namespace

std::string EncodeMember(const Member& member) { return Encode(member); }
Result<Member> DecodeMember(ByteSpan bytes) { return Decode<Member>(bytes); }
std::string EncodeMembership(const MembershipMessage& message) { return Encode(message); }
Result<MembershipMessage> DecodeMembership(ByteSpan bytes) {
  return Decode<MembershipMessage>(bytes);
}

}  // namespace farandole
