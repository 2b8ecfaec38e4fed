#include "core/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <regex>
#include <sstream>
#include <string>

#include "test/support/page.h"

namespace farandole {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string ErrorOf(const Environment& environment) {
  const Result<Config> config = ParseConfig(environment);
  if (config.ok()) return "";
  EXPECT_EQ(config.status().code(), Code::kInvalidArgument);
  return config.status().message();
}

TEST(ParseConfig, GivesTheDefaultsForAnEmptyEnvironment) {
  const Result<Config> config = ParseConfig({});
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config.value().fusion_threshold_bytes, 134'217'728);
  EXPECT_EQ(config.value().group_bytes, 4'194'304);
  EXPECT_EQ(config.value().stall_warning_s, 10);
  EXPECT_EQ(config.value().plane_timeout_s, 60);
  EXPECT_EQ(config.value().log_level, LogLevel::kWarning);
  EXPECT_EQ(config.value().mpi_plugin, "");
}

TEST(ParseConfig, ReadsEveryKindOfField) {
  const Result<Config> config = ParseConfig({{"FARANDOLE_FUSION_THRESHOLD", "0"},
                                             {"FARANDOLE_PLANE_TIMEOUT_S", "0.25"},
                                             {"FARANDOLE_LOG_LEVEL", "DEBUG"},
                                             {"FARANDOLE_MPI_PLUGIN", "/opt/x.so"}});
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config.value().fusion_threshold_bytes, 0);
  EXPECT_EQ(config.value().plane_timeout_s, 0.25);
  EXPECT_EQ(config.value().log_level, LogLevel::kDebug);
  EXPECT_EQ(config.value().mpi_plugin, "/opt/x.so");
}

TEST(ParseConfig, TreatsAnEmptyValueAsUnset) {
  const Result<Config> config = ParseConfig(
      {{"FARANDOLE_STALL_SHUTDOWN_S", ""}, {"FARANDOLE_STALL_SHUTDOWN_TIME_SECONDS", "5"}});
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config.value().stall_shutdown_s, 5);
}

TEST(ParseConfig, RefusesJunkNamingVariableValueAndRange) {
  const struct {
    std::string name;
    std::vector<std::string> junk;
    std::string wanted;
  } rows[] = {{"FARANDOLE_FUSION_THRESHOLD",
               {"abc", "12abc", " 12", "1.5", "-1", "1e3", "99999999999999999999"},
               "a whole number of bytes, 0 to 1099511627776"},
              {"FARANDOLE_PLANE_TIMEOUT_S",
               {"0", "nan", "inf", "-3", "60s"},
               "a number of seconds, 0.001 to 31536000"},
              {"FARANDOLE_LOG_LEVEL", {"loud"}, "one of trace, debug, info, warning, error, off"},
              {"FARANDOLE_NAN_CHECK", {"1"}, "one of off, warn, raise"},
              {"FARANDOLE_ALLOW_PICKLE", {"no"}, "0 or 1"},
              {"FARANDOLE_PORTS",
               {"50000", "50100-50000", "0-9", "1-65536", "-", "5-", "-5", " 1-2", "1-2,4-5"},
               "FIRST-LAST, ports from 1 to 65535, as 50000-50100"}};
  for (const auto& [name, junk, wanted] : rows) {
    for (const std::string& value : junk) {
      EXPECT_EQ(ErrorOf({{name, value}}), name + "=\"" + value + "\" is not " + wanted);
    }
  }
}

TEST(ParseConfig, TakesOneOfThreeWordsForNanCheck) {
  EXPECT_EQ(Config{}.nan_check, NanCheck::kOff);
  EXPECT_EQ(ParseConfig({{"FARANDOLE_NAN_CHECK", "off"}}).value().nan_check, NanCheck::kOff);
  EXPECT_EQ(ParseConfig({{"FARANDOLE_NAN_CHECK", "warn"}}).value().nan_check, NanCheck::kWarn);
  EXPECT_EQ(ParseConfig({{"FARANDOLE_NAN_CHECK", "raise"}}).value().nan_check, NanCheck::kRaise);
}

TEST(ParseConfig, ReadsPortsWithBothEndsOfTheirRange) {
  EXPECT_EQ(Config{}.ports.first, 0);
  const PortRange ports = ParseConfig({{"FARANDOLE_PORTS", "1-65535"}}).value().ports;
  EXPECT_EQ(ports.first, 1);
  EXPECT_EQ(ports.last, 65'535);
}

TEST(ParseConfig, SuggestsTheNearestNameForAnUnknownOne) {
  EXPECT_EQ(ErrorOf({{"FARANDOLE_FUSION_TRESHOLD", "1"}}),
            "FARANDOLE_FUSION_TRESHOLD is not a setting of Farandole; did you mean "
            "FARANDOLE_FUSION_THRESHOLD?");
}

TEST(ParseConfig, AcceptsNamesThatLaunchersAndScriptsRead) {
  EXPECT_EQ(ErrorOf({{"FARANDOLE_VENV", "/x"},
                     {"FARANDOLE_RANK", "0"},
                     {"FARANDOLE_TEST_X", "1"},
                     {"FARANDOLE_RANK_PROCESS", "1 0/2"}}),
            "");
}

TEST(ParseConfig, TakesSwitchesAsZeroOrOne) {
  EXPECT_TRUE(Config{}.allow_pickle);
  EXPECT_FALSE(ParseConfig({{"FARANDOLE_ALLOW_PICKLE", "0"}}).value().allow_pickle);
}

TEST(ParseConfig, SuggestsOnlyNamesThatSomethingReads) {
  for (const char* name : {"FARANDOLE_RENDEZVOUS", "FARANDOLE_CROSS_RANK", "FARANDOLE_LIBRARY",
                           "FARANDOLE_EXPORT_TORCH_ENV"}) {
    EXPECT_THAT(ErrorOf({{name, "1"}}), HasSubstr("is not a setting of Farandole"));
  }
}

TEST(ParseConfig, ReadsTheStallShutdownByBothItsNames) {
  for (const char* name : {"FARANDOLE_STALL_SHUTDOWN_S", "FARANDOLE_STALL_SHUTDOWN_TIME_SECONDS"}) {
    const Result<Config> config = ParseConfig({{name, "30"}});
    ASSERT_TRUE(config.ok()) << config.status().message();
    EXPECT_EQ(config.value().stall_shutdown_s, 30) << name;
  }
  EXPECT_EQ(Config{}.stall_shutdown_s, 0);
}

TEST(ParseConfig, IgnoresEverybodyElsesVariables) {
  EXPECT_EQ(ErrorOf({{"PATH", "/bin"}, {"HOROVOD_FUSION_THRESHOLD", "x"}, {"FARANDOL", "y"}}), "");
}

TEST(Describe, GivesTextThatParsesBackToTheSameConfig) {
  Config config;
  config.fusion_threshold_bytes = 12'345;
  config.plane_timeout_s = 0.125;
  config.log_level = LogLevel::kTrace;
  config.mpi_library = "/lib/libmpi.so.40";
  config.allow_pickle = false;
  config.nan_check = NanCheck::kRaise;
  config.ports = {50'000, 50'100};
  Environment environment;
  for (const SettingText& setting : Describe(config)) environment[setting.name] = setting.value;
  const Result<Config> parsed = ParseConfig(environment);
  ASSERT_TRUE(parsed.ok()) << parsed.status().message();
  EXPECT_EQ(parsed.value().fusion_threshold_bytes, 12'345);
  EXPECT_EQ(parsed.value().plane_timeout_s, 0.125);
  EXPECT_EQ(parsed.value().ports.last, 50'100);
  EXPECT_EQ(parsed.value().log_level, LogLevel::kTrace);
  EXPECT_EQ(parsed.value().mpi_library, "/lib/libmpi.so.40");
  EXPECT_FALSE(parsed.value().allow_pickle);
}

TEST(Describe, TellsUnitRangeAndDefault) {
  const std::vector<SettingText> settings = Describe(Config{});
  EXPECT_EQ(settings.front().name, "FARANDOLE_FUSION_THRESHOLD");
  EXPECT_TRUE(settings.front().agreed);
  EXPECT_THAT(settings.front().help,
              AllOf(HasSubstr("bytes, 0 to 1099511627776"), HasSubstr("Default 134217728")));
}

/// Breaks `text` into lines of at most 120 characters, the further ones indented by two.
std::string Wrapped(const std::string& text) {
  constexpr size_t kColumns = 120;
  std::istringstream words(text);
  std::string lines;
  std::string line;
  for (std::string word; words >> word;) {
    if (!line.empty() && line.size() + 1 + word.size() > kColumns) {
      lines += line + "\n";
      line = " ";
    }
    line += (line.empty() ? "" : " ") + word;
  }
  return lines + line + "\n";
}

/// The list of docs/settings.md.
std::string ListOfSettings() {
  const std::regex variable("FARANDOLE_[A-Z_]+");
  std::string list;
  for (const SettingText& setting : Describe(Config{})) {
    std::string text = setting.help + (setting.agreed ? " The same on all ranks." : "");
    text = std::regex_replace(text, variable, "`$&`");
    list += Wrapped("- **`" + setting.name + "`** " + text);
  }
  return list;
}

/// The same text without empty lines and headings: the page has the list in groups.
std::string WithoutHeadings(const std::string& text) {
  std::istringstream all(text);
  std::string list;
  for (std::string line; std::getline(all, line);) {
    if (!line.empty() && line.front() != '#') list += line + "\n";
  }
  return list;
}

TEST(Describe, IsWhatTheSettingsPageLists) {
  const std::string wanted = ListOfSettings();
  const std::string page = PartOfPage(FARANDOLE_TEST_DOCS "/settings.md", "Describe");
  EXPECT_TRUE(WithoutHeadings(page) == wanted) << "docs/settings.md should list:\n" << wanted;
}

TEST(ReadEnvironment, SeesWhatTheProcessWasGiven) {
  const Environment environment = ReadEnvironment();
  EXPECT_EQ(environment.count("PATH"), 1u);
}

}  // namespace
}  // namespace farandole
