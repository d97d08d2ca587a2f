#pragma once

#include "CoreMinimal.h"
#include "GameFramework/GameModeBase.h"

#include "TavernGameMode.generated.h"

/** Puts Mira, a lamp and the widget into an empty map. */
UCLASS()
class ATavernGameMode : public AGameModeBase
{
	GENERATED_BODY()

protected:
	virtual void BeginPlay() override;
};
