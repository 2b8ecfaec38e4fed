#include "core/launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace farandole {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Launcher Detect(const Environment& environment) {
  const Result<Launcher> launcher = DetectLauncher(environment);
  EXPECT_TRUE(launcher.ok()) << launcher.status().message();
  return launcher.ok() ? launcher.value() : Launcher{};
}

std::string ErrorOf(const Environment& environment) {
  const Result<Launcher> launcher = DetectLauncher(environment);
  if (launcher.ok()) return "";
  EXPECT_EQ(launcher.status().code(), Code::kInvalidArgument);
  return launcher.status().message();
}

/// "source rank/size local_rank/local_size"
std::string Text(const Launcher& found) {
  const auto of = [](int a, int b) { return " " + std::to_string(a) + "/" + std::to_string(b); };
  return std::string(found.source) + of(found.rank, found.size) +
         of(found.local_rank, found.local_size);
}

Environment OpenMpi(const char* rank, const char* size) {
  return {{"OMPI_COMM_WORLD_RANK", rank},
          {"OMPI_COMM_WORLD_SIZE", size},
          {"OMPI_COMM_WORLD_LOCAL_RANK", rank},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", size}};
}

Environment SlurmStep(const char* step) {
  return {{"SLURM_STEP_ID", step},        {"SLURM_PROCID", "13"},
          {"SLURM_STEP_NUM_TASKS", "14"}, {"SLURM_LOCALID", "1"},
          {"SLURM_NODEID", "3"},          {"SLURM_STEP_TASKS_PER_NODE", "4(x3),2"}};
}

Environment With(Environment a, const Environment& b) {
  a.insert(b.begin(), b.end());
  return a;
}

TEST(DetectLauncher, ReadsWhatEachLauncherSays) {
  const Environment torch = {{"RANK", "1"}, {"WORLD_SIZE", "2"}};
  const Environment pmi = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"SLURM_LOCALID", "7"}};
  const std::pair<Environment, const char*> rows[] = {
      {{{"PATH", "/bin"}}, "single 0/1 -1/-1"},
      {{{"FARANDOLE_RANK", "3"},
        {"FARANDOLE_SIZE", "8"},
        {"FARANDOLE_LOCAL_RANK", "1"},
        {"FARANDOLE_LOCAL_SIZE", "2"}},
       "farandole 3/8 1/2"},
      {{{"HOROVOD_RANK", "1"}, {"HOROVOD_SIZE", "2"}}, "horovod 1/2 -1/-1"},
      {OpenMpi("1", "4"), "openmpi 1/4 1/4"},
      {{{"MV2_COMM_WORLD_RANK", "1"}, {"MV2_COMM_WORLD_SIZE", "2"}}, "mvapich2 1/2 -1/-1"},
      {With({{"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "1"}}, pmi), "pmi 1/2 0/1"},
      {torch, "single 0/1 -1/-1"},  // without proof of a rendezvous
      {With({{"MASTER_ADDR", "h"}}, torch), "env:// 1/2 -1/-1"},
      {With({{"TORCHELASTIC_RUN_ID", "x"}}, torch), "torchrun 1/2 -1/-1"},
      {SlurmStep("batch"), "single 0/1 -1/-1"},
      {SlurmStep("0"), "slurm 13/14 1/2"},
      {With({{"PMIX_RANK", "12"}}, SlurmStep("0")), "pmix 12/14 1/2"},
      {With(OpenMpi("1", "4"), SlurmStep("0")), "openmpi 1/4 1/4"}};  // the step of its daemon
  for (const auto& [environment, wanted] : rows) EXPECT_EQ(Text(Detect(environment)), wanted);
  EXPECT_EQ(ErrorOf(pmi), "SLURM_LOCALID=\"7\" is not a whole number, 0 to 1");
}

TEST(DetectLauncher, LearnsWhichLibraryBelongsToTheLauncher) {
  EXPECT_EQ(Detect(OpenMpi("1", "4")).mpi_library, "");
  EXPECT_EQ(Detect(With({{"OMPI_LIBDIR_LOC", "/opt/mpi/lib"}}, OpenMpi("1", "4"))).mpi_library,
            "/opt/mpi/lib/libmpi.so.40");
}

TEST(DetectLauncher, CountsTheTasksOfAHostFromSlurmsList) {
  Environment first_host = SlurmStep("0");
  first_host["SLURM_NODEID"] = "2";
  EXPECT_EQ(Detect(first_host).local_size, 4);
  for (const char* strange : {"", "4(x", "4(xy),2", "x", "4(x2)"}) {
    Environment environment = SlurmStep("0");
    environment["SLURM_STEP_TASKS_PER_NODE"] = strange;
    EXPECT_EQ(Detect(environment).local_size, -1) << strange;
  }
}

TEST(DetectLauncher, PrefersOurVariablesWhenAnotherAgreesOnTheSize) {
  EXPECT_EQ(
      Detect(With(OpenMpi("1", "4"), {{"FARANDOLE_RANK", "2"}, {"FARANDOLE_SIZE", "4"}})).rank, 2);
}

TEST(DetectLauncher, RefusesTwoLaunchersThatDisagreeOnTheSize) {
  const Environment torchrun = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}};
  EXPECT_THAT(ErrorOf(With(OpenMpi("1", "4"), torchrun)),
              AllOf(HasSubstr("env:// says 2"), HasSubstr("openmpi says 4")));
}

TEST(DetectLauncher, RefusesJunkNamingTheVariable) {
  EXPECT_THAT(ErrorOf(OpenMpi("x", "4")), HasSubstr("OMPI_COMM_WORLD_RANK=\"x\""));
  EXPECT_THAT(ErrorOf(OpenMpi("0", "0")), HasSubstr("OMPI_COMM_WORLD_SIZE=\"0\""));
  EXPECT_THAT(ErrorOf(OpenMpi("4", "4")),
              HasSubstr("OMPI_COMM_WORLD_RANK=\"4\" is not a whole number, 0 to 3"));
}

TEST(DetectLauncher, RefusesHalfAnAnnouncementOfOurs) {
  EXPECT_EQ(ErrorOf({{"FARANDOLE_SIZE", "2"}}), "FARANDOLE_SIZE is set but FARANDOLE_RANK is not");
  EXPECT_EQ(ErrorOf({{"FARANDOLE_RANK", "1"}}), "FARANDOLE_RANK is set but FARANDOLE_SIZE is not");
}

Environment Ours() { return {{"FARANDOLE_RANK", "1"}, {"FARANDOLE_SIZE", "4"}}; }

Environment EnvUrl() {
  return {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "::1"}, {"MASTER_PORT", "29500"}};
}

InitOptions Say(int rank, int size, const std::string& address = "") {
  InitOptions options;
  options.rank = rank;
  options.size = size;
  options.address = address;
  return options;
}

std::string ErrorOf(const Environment& environment, const InitOptions& options) {
  const Result<Launcher> launcher = DetectLauncher(environment, options);
  return launcher.ok() ? "" : launcher.status().message();
}

TEST(DetectLauncher, FindsWhereRankZeroListens) {
  EXPECT_EQ(Detect(With(Ours(), {{"FARANDOLE_ADDRESS", "node7:29500"}})).address, "node7:29500");
  EXPECT_EQ(Detect(EnvUrl()).address, "[::1]:29500");
  EXPECT_EQ(DetectLauncher({}, Say(1, 2, "tcp://[::1]:29500")).value().address, "[::1]:29500");
  EXPECT_EQ(DetectLauncher({}, Say(1, 2, "file:///shared/job7")).value().folder, "/shared/job7");
  EXPECT_EQ(DetectLauncher(EnvUrl(), Say(1, 2, "env://")).value().address, "[::1]:29500");
}

TEST(DetectLauncher, FindsTheFirstNodeOfASlurmStepAndAPortOfItsOwn) {
  Environment step = SlurmStep("0");
  step["SLURM_JOB_ID"] = "1234";
  for (const auto& [list, host] :
       {std::pair("n7", "n7:"), std::pair("rack1-n[03-04,7],x", "rack1-n03:"),
        std::pair("a[1-2]b[08,9]c", "a1b08c:"), std::pair("x,y", "x:")}) {
    step["SLURM_STEP_NODELIST"] = list;
    EXPECT_THAT(Detect(step).address, ::testing::StartsWith(host));
  }
  const std::string port = Detect(step).address;
  step["SLURM_STEP_ID"] = "1";
  EXPECT_NE(Detect(step).address, port);
}

TEST(DetectLauncher, ChoosesThePortOfASlurmStepFromTheRange) {
  Environment step = SlurmStep("0");
  step["SLURM_JOB_ID"] = "1234";
  step["SLURM_STEP_NODELIST"] = "x";
  step["FARANDOLE_PORTS"] = "50000-50001";
  EXPECT_EQ(Detect(step).address, "x:50000");
  step["SLURM_STEP_ID"] = "1";
  EXPECT_EQ(Detect(step).address, "x:50001");
  step["FARANDOLE_PORTS"] = "50000-50009";  // of which the first two are for named ports
  EXPECT_EQ(Detect(step).address, "x:50001");
  step["SLURM_STEP_ID"] = "2";
  EXPECT_EQ(Detect(step).address, "x:50000");
}

TEST(DetectLauncher, RefusesAnAddressThatIsNone) {
  for (const char* junk : {"node7", "node7:", "node7:0", "node7:65536", ":29500", "::1:29500",
                           "node7:x", "http://node7:80/x", "file://job7"}) {
    EXPECT_THAT(ErrorOf({}, Say(0, 2, junk)), HasSubstr(junk)) << junk;
  }
  EXPECT_THAT(ErrorOf({}, Say(0, 2, "env://")), HasSubstr("MASTER_ADDR is not set"));
}

TEST(DetectLauncher, TakesTheCallersWordWhereALauncherSaysOneRankOrTheSame) {
  Environment shell = SlurmStep("0");
  shell["SLURM_PROCID"] = "0";
  shell["SLURM_STEP_NUM_TASKS"] = "1";
  shell["SLURM_LOCALID"] = "0";
  EXPECT_EQ(Text(DetectLauncher(shell, Say(1, 2, "h:1")).value()), "init 1/2 -1/-1");
  EXPECT_EQ(DetectLauncher(Ours(), Say(1, 4, "h:1")).value().rank, 1);
}

TEST(DetectLauncher, NamesBothValuesWhereCallerAndLauncherContradict) {
  EXPECT_EQ(ErrorOf(Ours(), Say(0, 4)),
            "init says rank 0, but farandole says 1; leave one of them out");
  EXPECT_EQ(ErrorOf(Ours(), Say(1, 3)),
            "init says size 3, but farandole says 4; leave one of them out");
  EXPECT_THAT(ErrorOf(With(Ours(), {{"FARANDOLE_ADDRESS", "a:1"}}), Say(1, 4, "b:1")),
              AllOf(HasSubstr("b:1"), HasSubstr("a:1")));
}

TEST(DetectLauncher, SaysWhatIsMissing) {
  EXPECT_THAT(ErrorOf({}, Say(-1, 2)), HasSubstr("size 2 without a rank"));
  EXPECT_THAT(ErrorOf({}, Say(0, -1, "h:1")), HasSubstr("no size was given"));
  EXPECT_THAT(ErrorOf({}, Say(2, 2)), HasSubstr("rank 2 of a job of size 2"));
}

std::string NetworkOf(const Environment& environment, const std::string& setting) {
  const Result<std::string> network = ChooseNetwork(Detect(environment), setting);
  return network.ok() ? network.value() : network.status().message();
}

TEST(ChooseNetwork, IsMpiUnderAnMpiLauncherUnlessSomebodyNamesAnAddressForFarandole) {
  EXPECT_EQ(NetworkOf(OpenMpi("1", "4"), "auto"), "mpi");
  EXPECT_EQ(NetworkOf(With(OpenMpi("1", "2"), EnvUrl()), "auto"), "mpi");
  EXPECT_EQ(NetworkOf(With(OpenMpi("1", "2"), EnvUrl()), "tcp"), "tcp");
  EXPECT_EQ(NetworkOf(With(OpenMpi("1", "4"), {{"FARANDOLE_ADDRESS", "h:1"}}), "auto"), "tcp");
  const Environment pmi = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}};
  EXPECT_EQ(NetworkOf(pmi, "auto"), "mpi");
  const Environment speaks =
      With({{"PMI_FD", "9"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}}, pmi);
  EXPECT_EQ(NetworkOf(speaks, "auto"), "tcp");
  EXPECT_EQ(NetworkOf(speaks, "mpi"), "mpi");
  EXPECT_EQ(Detect(speaks).address, "");  // another program's store may listen there
  EXPECT_EQ(Detect(With({{"FARANDOLE_ADDRESS", "h:1"}}, speaks)).pmi_descriptor, -1);
  EXPECT_EQ(NetworkOf(EnvUrl(), "auto"), "tcp");
  EXPECT_EQ(NetworkOf(EnvUrl(), "mpi"), "mpi");
}

TEST(ChooseNetwork, SaysWhatIsMissing) {
  EXPECT_THAT(NetworkOf(Ours(), "auto"), HasSubstr("set FARANDOLE_ADDRESS=host:port"));
  EXPECT_THAT(NetworkOf(OpenMpi("1", "4"), "tcp"), HasSubstr("nobody says where rank 0 is"));
  EXPECT_THAT(NetworkOf(Ours(), "ucx"), HasSubstr("FARANDOLE_NETWORK=\"ucx\""));
  const Environment agent = {{"TORCHELASTIC_RUN_ID", "x"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
  EXPECT_THAT(NetworkOf(With(EnvUrl(), agent), "auto"), HasSubstr("pass a store"));
}

TEST(DetectLauncher, AsksNoLauncherAboutAJobApart) {
  InitOptions options;
  options.rank = 1;
  options.size = 2;
  options.address = "h:1";
  options.apart = true;
  const Result<Launcher> found = DetectLauncher(OpenMpi("3", "4"), options);
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  EXPECT_EQ(found.value().rank, 1);
  EXPECT_EQ(found.value().size, 2);
  EXPECT_EQ(ChooseNetwork(found.value(), "mpi").value(), "tcp");
  options.size = -1;
  EXPECT_THAT(DetectLauncher(OpenMpi("3", "4"), options).status().message(),
              HasSubstr("needs a rank and a size"));
}

Environment InJob(const char* rank, const char* job) {
  return With(OpenMpi(rank, "4"), {{"PMIX_NAMESPACE", job}});
}

Environment Inherited(const Environment& environment) {
  return With(environment, {{kRankProcess, RankProcess(Detect(environment), 4711)}});
}

Status Refusal(const Environment& environment) {
  return RefuseDescendant(environment, Detect(environment));
}

TEST(RefuseDescendant, NamesTheRankItsProcessAndTheVariableToLeaveOut) {
  const Status refusal = Refusal(Inherited(InJob("1", "123")));
  EXPECT_EQ(refusal.code(), Code::kUnimplemented);
  EXPECT_THAT(refusal.message(),
              AllOf(HasSubstr("rank 1 of this job has joined as process 4711"),
                    HasSubstr("__main__"), HasSubstr("without OMPI_COMM_WORLD_RANK")));
}

TEST(RefuseDescendant, LetsInWhomNobodyMarkedAndWhomAnotherLauncherStarted) {
  EXPECT_TRUE(Refusal(InJob("1", "123")).ok());
  Environment nested = Inherited(InJob("1", "123"));
  nested["PMIX_NAMESPACE"] = "124";
  EXPECT_TRUE(Refusal(nested).ok());
  Environment other_rank = Inherited(InJob("1", "123"));
  other_rank["OMPI_COMM_WORLD_RANK"] = "2";
  EXPECT_TRUE(Refusal(other_rank).ok());
}

}  // namespace
}  // namespace farandole
