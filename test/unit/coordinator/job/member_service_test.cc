#include "coordinator/job/member_service.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/clock.h"
#include "core/net/address.h"

namespace farandole {
namespace {

SocketAddress Loopback() { return ParseSocketAddress("127.0.0.1:0").value(); }

std::shared_ptr<MemberService> Serve() {
  MemberService::Options options;
  options.key = std::string(32, 'k');
  options.job = "job";
  options.where = {Loopback()};
  options.silence_ns = 300 * kNsPerSecond;
  return MemberService::Create(options).value();
}

// One rank has lost a third, which is stopped, and says so while the other is between its engine's
// end and reinit(), which tells what that engine knew. @return whether both go on at once, and not
// after the 2 s for which that one waits for an answer of who is stopped.
bool GoOnAtOnce() {
  const std::shared_ptr<MemberService> first = Serve(), second = Serve();
  const Listening silent = ListenOn({Loopback()}, {}).value();  // connects, and never answers
  const Member stopped = {1, silent.addresses.front().ToString(), first->self().host};
  MemberList list;
  list.generation = {1, stopped.id};
  list.members = {stopped, first->self(), second->self()};
  list.root = stopped.address;
  first->Begin(list, {});
  second->Begin(list, {});
  first->Forget();
  second->Agree({{}, {stopped.id}});
  const auto none = first->AwaitAssignment(kNsPerSecond / 2);  // the report comes meanwhile
  EXPECT_TRUE(none.ok() && !none.value());
  first->Agree({{}, {stopped.id}});
  for (const auto& service : {first, second}) {
    const auto given = service->AwaitAssignment(kNsPerSecond);
    if (!given.ok() || !given.value()) return false;
    EXPECT_EQ(given.value()->list.members.size(), 2u);
  }
  return true;
}

TEST(MemberService, HeedsWhomItsEngineMissedAlsoAfterAnotherRanksReport) {
  EXPECT_TRUE(GoOnAtOnce() || GoOnAtOnce() || GoOnAtOnce()) << "of three times, on a busy machine";
}

}  // namespace
}  // namespace farandole
