#include "core/pmi_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <barrier>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/clock.h"

namespace farandole {
namespace {

using testing::HasSubstr;

using MakeStore = std::function<std::shared_ptr<Store>()>;

/// A launcher of two processes, which keeps values of 258 bytes at most and replaces none.
class Launcher {
 public:
  /// Says something else to requests that begin so: "" ends the connection.
  std::map<std::string, std::string> odd;
  std::map<std::string, std::string> values;
  int finalized = 0;

  /// Runs `rank` in each process, which must leave no failure behind.
  void Run(const std::function<void(size_t rank, const MakeStore& make)>& rank) {
    std::array<std::array<int, 2>, 2> ends{};
    std::array<pid_t, 2> children{};
    for (auto& pair : ends) {
      ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair.data()), 0);
    }
    for (size_t i = 0; i < 2; ++i) {
      children[i] = fork();
      if (children[i] != 0) continue;
      for (const int other : {ends[i][1], ends[1 - i][0], ends[1 - i][1]}) close(other);
      rank(i, [own = ends[i][0]] { return PmiStore(own); });
      std::exit(testing::Test::HasFailure() ? 1 : 0);
    }
    std::array<std::thread, 2> threads;
    for (size_t i = 0; i < 2; ++i) {
      close(ends[i][0]);
      threads[i] = std::thread([this, end = ends[i][1]] { Serve(end); });
    }
    for (size_t i = 0; i < 2; ++i) {
      int status = 0;
      EXPECT_EQ(waitpid(children[i], &status, 0), children[i]);
      EXPECT_EQ(status, 0) << "rank " << i;
      threads[i].join();
    }
  }

 private:
  void Serve(int end) {
    std::string line;
    char byte = 0;
    while (read(end, &byte, 1) == 1) {
      if (byte != '\n') {
        line += byte;
        continue;
      }
      const std::string answer = AnswerTo(line);
      line.clear();
      if (answer.empty()) break;
      // In two parts, as a socket may.
      (void)!write(end, answer.data(), 5);
      (void)!write(end, answer.data() + 5, answer.size() - 5);
    }
    close(end);
    barrier_.arrive_and_drop();
  }

  std::string AnswerTo(const std::string& line) {
    const std::string command = line.substr(4, line.find(' ') - 4);
    if (command == "barrier_in") barrier_.arrive_and_wait();
    const std::lock_guard lock(mutex_);
    if (const auto found = odd.find(command); found != odd.end()) return found->second;
    const std::string key = Field(line, " key=");
    if (command == "put") {
      const bool is_new = values.emplace(key, Field(line, " value=")).second;
      const bool is_long = Field(line, " value=").size() >= 258;
      return is_new && !is_long ? "cmd=put_result rc=0\n" : "cmd=put_result rc=-1 msg=no\n";
    }
    if (command == "finalize") ++finalized;
    const std::map<std::string, std::string> answers = {
        {"init", "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n"},
        {"get_maxes", "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=258\n"},
        {"get_my_kvsname", "cmd=my_kvsname kvsname=space\n"},
        {"barrier_in", "cmd=barrier_out\n"},
        {"get", "cmd=get_result rc=0 value=" + values[key] + "\n"},
        {"finalize", "cmd=finalize_ack\n"}};
    return answers.at(command);
  }
  static std::string Field(const std::string& line, const std::string& name) {
    const size_t at = line.find(name);
    return at == std::string::npos
               ? ""
               : line.substr(at + name.size(), line.find(' ', at + 1) - at - name.size());
  }

  std::mutex mutex_;
  std::barrier<> barrier_{2};
};

/// As a join asks: again and again.
Result<std::string> Got(const std::shared_ptr<Store>& store) {
  for (;;) {
    Result<std::string> got = store->Get("key", kNsPerMs);
    if (got.status().code() != Code::kTimeout) return got;
  }
}
Status Put(const std::shared_ptr<Store>& store, const std::string& value,
           const std::string& key = "key") {
  for (;;) {
    Status status = store->Set(key, value);
    if (status.code() != Code::kTimeout) return status;
  }
}

TEST(PmiStore, GivesValuesOfAnyLengthRendezvousAfterRendezvous) {
  Launcher launcher;
  launcher.Run([](size_t rank, const MakeStore& make) {
    for (const int bytes : {0, 1, 127, 128, 129, 1000}) {
      const std::string value =
          std::string(static_cast<size_t>(bytes), ' ') + "\n=" + std::to_string(bytes);
      if (rank == 0) {
        EXPECT_EQ(Put(make(), value).message(), "");
      } else {
        const std::shared_ptr<Store> store = make();
        EXPECT_EQ(Got(store).value(), value);
        EXPECT_EQ(Got(store).value(), value);  // as where rank 0 is asked for again
      }
    }
  });
  EXPECT_EQ(launcher.finalized, 2);
}

TEST(PmiStore, SaysThatItWaitsAndTheValueOfALaterTryIsGot) {
  Launcher launcher;
  launcher.Run([](size_t rank, const MakeStore& make) {
    if (rank == 0) {
      const Status early = make()->Set("key", "given up");
      EXPECT_EQ(early.code(), Code::kTimeout);
      EXPECT_THAT(early.message(), HasSubstr("a rank that has not called init()"));
      EXPECT_TRUE(Put(make(), "second").ok());
    } else {
      usleep(100'000);
      EXPECT_EQ(Got(make()).value(), "given up");
      EXPECT_EQ(Got(make()).value(), "second");
    }
  });
}

TEST(PmiStore, SaysWhatTheLauncherSays) {
  const std::map<std::string, std::pair<std::string, std::string>> cases = {
      {"init", {"cmd=response_to_init pmi_version=2 pmi_subversion=0 rc=0\n", "pmi_version=2"}},
      {"get_maxes", {"cmd=maxes rc=7\n", "cmd=maxes rc=7"}},
      {"get_my_kvsname", {"", "it has ended"}},
      {"barrier_in", {"cmd=barrier_out_of_order\n", "barrier_out_of_order"}},
      {"put", {"cmd=put_result rc=-1 msg=full\n", "msg=full"}}};
  for (const auto& [command, what] : cases) {
    Launcher launcher;
    launcher.odd[command] = what.first;
    launcher.Run([&text = what.second](size_t rank, const MakeStore& make) {
      const Status status = Put(make(), "value", "key-of-" + std::to_string(rank));
      EXPECT_EQ(status.code(), Code::kUnavailable);
      EXPECT_THAT(status.message(), HasSubstr("the launcher, at PMI_FD="));
      EXPECT_THAT(status.message(), HasSubstr(text));
    });
  }
}

TEST(PmiStore, RefusesAValueThatIsNoneOfOurs) {
  for (const std::string value : {"xy", "abc"}) {
    Launcher launcher;
    launcher.odd["get"] = "cmd=get_result rc=0 value=" + value + "\n";
    launcher.Run([&](size_t, const MakeStore& make) {
      EXPECT_THAT(Got(make()).status().message(), HasSubstr("value=" + value));
    });
  }
}

TEST(PmiStore, SaysThatTheDescriptorIsNoSocket) {
  const pid_t child = fork();
  if (child == 0)
    _exit(PmiStore(1'000'000)->Set("key", "value").code() == Code::kUnavailable ? 0 : 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace farandole
